//! From file, environment and interfaces to a [`DeviceConfig`], as pure functions.

use std::io::{self, Read};
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};

use crate::settings::Values;
use crate::{ConfigError, DeviceConfig, Interface, NetView, Plane, settings};

/// A configuration file that has been read but not understood yet.
#[derive(Debug, Clone)]
pub struct ConfigFile {
    /// Where it was, for error messages.
    pub path: PathBuf,
    /// Its text.
    pub text: String,
}

impl ConfigFile {
    /// Reads a file that must exist.
    ///
    /// # Errors
    /// [`ConfigError::ReadFile`].
    pub fn read(path: &Path) -> Result<ConfigFile, ConfigError> {
        match read_small(path) {
            Ok(Some(text)) => Ok(ConfigFile { path: path.to_owned(), text }),
            Ok(None) => Err(ConfigError::NoConfigFile { path: path.to_owned() }),
            Err(source) => Err(ConfigError::ReadFile { path: path.to_owned(), source }),
        }
    }

    /// Reads a file that may be absent.
    ///
    /// # Errors
    /// [`ConfigError::ReadFile`] when it is there and cannot be read.
    pub fn read_if_present(path: &Path) -> Result<Option<ConfigFile>, ConfigError> {
        match ConfigFile::read(path) {
            Err(ConfigError::ReadFile { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
            other => other.map(Some),
        }
    }
}

/// No configuration is longer, bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The text of a file; `None` for what is no regular file (reading could wait, or never end) or is too large.
fn read_small(path: &Path) -> io::Result<Option<String>> {
    // Before it is opened: opening a FIFO waits for a writer.
    let here = std::fs::metadata(path)?;
    if !here.is_file() {
        return Ok(None);
    }
    let mut text = String::new();
    // Also what says that it is small may go on: files under /proc say that they are empty.
    std::fs::File::open(path)?.take(FILE_BYTES_MAX + 1).read_to_string(&mut text)?;
    Ok((text.len() as u64 <= FILE_BYTES_MAX).then_some(text))
}

/// Resolves a configuration: the file first, then variables over it, planes against the interfaces of `net`.
///
/// `env` gives the value of a variable; an empty value counts as unset.
///
/// # Errors
/// The first thing that is wrong.
pub fn resolve(
    env: &dyn Fn(&str) -> Option<String>,
    file: Option<&ConfigFile>,
    net: &NetView,
) -> Result<DeviceConfig, ConfigError> {
    let mut values = Values::default();
    if let Some(file) = file {
        apply_file(&mut values, file)?;
    }
    for setting in settings() {
        if let Some(text) = env(setting.name).filter(|text| !text.trim().is_empty()) {
            values.set(setting, setting.name, &text)?;
        }
    }
    let mut planes = match &values.planes {
        Some(list) => configured_planes(list, &values.planes_place, net)?,
        None => {
            let interface = net.preferred().ok_or(ConfigError::NoInterface)?;
            vec![plane(interface, interface.name.clone(), &interface.addrs)]
        }
    };
    match values.plane_rates.as_slice() {
        [] => {}
        [mbps] => planes.iter_mut().for_each(|plane| plane.rate_bps = Some(mbps * 1_000_000)),
        list if list.len() == planes.len() => {
            planes.iter_mut().zip(list).for_each(|(plane, mbps)| plane.rate_bps = Some(mbps * 1_000_000));
        }
        list => {
            let value = list.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
            let range = "one number of Mb/s, or as many as there are planes";
            return Err(ConfigError::BadValue { place: "METAROCE_PLANE_RATE".to_owned(), value, range });
        }
    }
    Ok(DeviceConfig {
        planes,
        base_port: values.base_port,
        paths_per_plane: values.paths,
        segment_bytes_max: values.segment,
        burst_packets_max: values.burst,
        rcvbuf_bytes: values.rcvbuf,
        gso: values.gso,
        impairment: values.impairment,
        cm_loss: values.cm_loss.unwrap_or(values.impairment.loss),
        log: values.log,
    })
}

fn apply_file(values: &mut Values, file: &ConfigFile) -> Result<(), ConfigError> {
    let path = || file.path.clone();
    let table: toml::Table = file.text.parse().map_err(|error: toml::de::Error| {
        let line = error.span().map_or(1, |span| 1 + file.text[..span.start].matches('\n').count());
        ConfigError::Syntax {
            path: path(),
            message: format!("line {line}: {}", error.message().replace('\n', " ")),
        }
    })?;
    for (key, value) in &table {
        let setting = settings().iter().find(|s| s.key().as_deref() == Some(key)).ok_or_else(|| {
            let known = settings().iter().filter_map(|s| s.key()).collect::<Vec<_>>().join(", ");
            ConfigError::UnknownKey { path: path(), key: key.clone(), known }
        })?;
        let place = format!("`{key}` in {}", file.path.display());
        let text = text_of(value).ok_or_else(|| {
            let (place, value) = (place.clone(), value.to_string().replace('\n', " "));
            ConfigError::BadValue { place, value, range: setting.range }
        })?;
        values.set(setting, &place, &text)?;
    }
    Ok(())
}

/// A TOML value as a variable would spell it: `planes = ["eth0", "eth1"]` is `eth0,eth1`.
fn text_of(value: &toml::Value) -> Option<String> {
    match value {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Float(number) => Some(number.to_string()),
        toml::Value::Boolean(switch) => Some(u8::from(*switch).to_string()),
        toml::Value::Array(items) => {
            let items: Option<Vec<String>> = items.iter().map(text_of).collect();
            items.map(|items| items.join(","))
        }
        _ => None,
    }
}

fn configured_planes(list: &str, place: &str, net: &NetView) -> Result<Vec<Plane>, ConfigError> {
    let mut planes: Vec<Plane> = Vec::new();
    for item in list.split(',').map(str::trim) {
        let (label, name) = match item.split_once('=') {
            Some((label, name)) => (Some(label.trim()), name.trim()),
            None => (None, item),
        };
        let (place, repeated) = (place.to_owned(), |name: &str| name.to_owned());
        if name.is_empty() || label == Some("") {
            let range = "a list of interfaces or addresses without empty items";
            return Err(ConfigError::BadValue { place, value: list.to_owned(), range });
        }
        let Some((interface, addrs)) = find(name, net) else {
            return Err(ConfigError::UnknownInterface { place, name: name.to_owned(), known: net.names() });
        };
        if addrs.is_empty() {
            return Err(ConfigError::NoAddress { place, name: name.to_owned() });
        }
        if planes.iter().any(|p| p.ifname == interface.name && p.addrs.iter().any(|a| addrs.contains(a))) {
            return Err(ConfigError::RepeatedPlane { place, name: repeated(name) });
        }
        // Peers pair planes by label, so a second plane on one interface gets a name that does not depend on addresses.
        let label = label.map_or_else(
            || {
                let same = planes.iter().filter(|p| p.ifname == interface.name).count();
                if same == 0 { interface.name.clone() } else { format!("{}.{}", interface.name, same + 1) }
            },
            str::to_owned,
        );
        if planes.iter().any(|p| p.label == label) {
            return Err(ConfigError::RepeatedPlane { place, name: repeated(&label) });
        }
        planes.push(plane(interface, label, &addrs));
    }
    Ok(planes)
}

/// The interface called `name` with all its addresses, or the interface that has the address `name` with that alone.
fn find<'a>(name: &str, net: &'a NetView) -> Option<(&'a Interface, Vec<IpAddr>)> {
    if let Some(interface) = net.interfaces.iter().find(|i| i.name == name) {
        return Some((interface, interface.addrs.clone()));
    }
    let (address, zone) = name.split_once('%').map_or((name, None), |(address, zone)| (address, Some(zone)));
    let ip: IpAddr = address.parse().ok()?;
    let has = |i: &&Interface| i.addrs.contains(&ip) && zone.is_none_or(|zone| zone == i.name);
    net.interfaces.iter().find(has).map(|interface| (interface, vec![ip]))
}

fn plane(interface: &Interface, label: String, addrs: &[IpAddr]) -> Plane {
    let mut addrs = addrs.to_vec();
    addrs.sort_by_key(rank);
    Plane {
        label,
        ifname: interface.name.clone(),
        ifindex: interface.index,
        mtu: interface.mtu,
        mac: interface.mac,
        addrs,
        up: interface.up && interface.running,
        rate_bps: None,
    }
}

/// GID order within a plane: IPv4, global IPv6, link-local IPv6; the kernel's order within each (stable sort).
pub(crate) fn rank(ip: &IpAddr) -> u8 {
    match ip {
        IpAddr::V4(_) => 0,
        IpAddr::V6(v6) if !Ipv6Addr::is_unicast_link_local(v6) => 1,
        IpAddr::V6(_) => 2,
    }
}

#[cfg(test)]
pub(crate) mod tests;
