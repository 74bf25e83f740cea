//! The environment under which an unmodified program sees `metaroce0`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use crate::libs::{DRIVER, Libraries, SHIM};

/// Options that become METAROCE_* variables, the same for `run` and `env`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct DeviceOptions {
    /// Interfaces or addresses of the planes, in order, e.g. `eth0,eth1` or `lo` (METAROCE_PLANES)
    #[arg(long, value_name = "LIST")]
    pub planes: Option<String>,
    /// Configuration file instead of /etc/metaroce.toml (METAROCE_CONFIG)
    #[arg(long, value_name = "FILE")]
    pub config: Option<String>,
    /// Share of packets to drop, e.g. `0.01` or `1%` (METAROCE_LOSS)
    #[arg(long, value_name = "SHARE", value_parser = fraction)]
    pub loss: Option<Fraction>,
    /// Share of packets to deliver behind later ones (METAROCE_REORDER)
    #[arg(long, value_name = "SHARE", value_parser = fraction)]
    pub reorder: Option<Fraction>,
    /// Share of packets to deliver twice (METAROCE_DUP)
    #[arg(long, value_name = "SHARE", value_parser = fraction)]
    pub dup: Option<Fraction>,
    /// Delay of every packet in microseconds (METAROCE_DELAY_US)
    #[arg(long, value_name = "US")]
    pub delay_us: Option<u32>,
    /// Seed of the injected faults; the same seed gives the same pattern (METAROCE_SEED)
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
}

/// A share of packets, 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fraction(f64);

/// Reads `0.01` and `1%`.
fn fraction(text: &str) -> Result<Fraction, String> {
    let (number, scale) = match text.strip_suffix('%') {
        Some(percent) => (percent, 100.0),
        None => (text, 1.0),
    };
    match number.trim().parse::<f64>() {
        Ok(value) if (0.0..=scale).contains(&value) => Ok(Fraction(value / scale)),
        _ => Err("a share between 0 and 1 (0.01) or 0% and 100% (1%) is needed".to_owned()),
    }
}

impl DeviceOptions {
    /// The variables these options stand for.
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        let fraction = |value: &Option<Fraction>| value.map(|share| share.0.to_string());
        [
            ("METAROCE_PLANES", self.planes.clone()),
            ("METAROCE_CONFIG", self.config.clone()),
            ("METAROCE_LOSS", fraction(&self.loss)),
            ("METAROCE_REORDER", fraction(&self.reorder)),
            ("METAROCE_DUP", fraction(&self.dup)),
            ("METAROCE_DELAY_US", self.delay_us.map(|us| us.to_string())),
            ("METAROCE_SEED", self.seed.map(|seed| seed.to_string())),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
        .collect()
    }
}

/// Everything to set for a program, in the order `metaroce env` prints it. `present` reads the environment there is.
pub fn variables(
    libraries: &Libraries,
    options: &DeviceOptions,
    present: impl Fn(&str) -> Option<OsString>,
) -> Vec<(&'static str, OsString)> {
    // libibverbs looks at IBV_DRIVERS only without RDMAV_DRIVERS: ours must not hide it.
    let drivers = present("RDMAV_DRIVERS").or_else(|| present("IBV_DRIVERS"));
    let mut all = vec![
        ("LD_PRELOAD", prepend(&libraries.shim, present("LD_PRELOAD"), SHIM, b" :", b' ')),
        ("RDMAV_DRIVERS", prepend(&libraries.driver, drivers, DRIVER, b":;", b':')),
    ];
    all.extend(options.variables().into_iter().map(|(name, value)| (name, value.into())));
    all
}

/// `first`, then the entries of `list` that are not an older copy of ours (`own_name` as last component).
fn prepend(
    first: &Path,
    list: Option<OsString>,
    own_name: &str,
    separators: &[u8],
    separator: u8,
) -> OsString {
    let mut bytes = first.as_os_str().as_bytes().to_owned();
    for entry in list.as_deref().unwrap_or_default().as_bytes().split(|byte| separators.contains(byte)) {
        let ours = Path::new(OsStr::from_bytes(entry)).file_name() == Some(OsStr::new(own_name));
        if !entry.is_empty() && !ours {
            bytes.push(separator);
            bytes.extend_from_slice(entry);
        }
    }
    OsString::from_vec(bytes)
}

/// One `export` line for a POSIX shell, quoted.
pub fn export_line(name: &str, value: &OsStr) -> Vec<u8> {
    let mut line = format!("export {name}='").into_bytes();
    for &byte in value.as_bytes() {
        match byte {
            b'\'' => line.extend_from_slice(b"'\\''"),
            _ => line.push(byte),
        }
    }
    line.extend_from_slice(b"'\n");
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn libraries() -> Libraries {
        Libraries {
            shim: "/l/libmetaroce_shim.so".into(),
            driver: "/d/libmetaroce".into(),
            provider: "/l/p.so".into(),
        }
    }

    #[test]
    fn variables__keep_what_is_there_and_replace_our_older_selves() {
        let present = |name: &str| match name {
            "LD_PRELOAD" => Some("/old/libmetaroce_shim.so /x/libfoo.so:/y/libbar.so".into()),
            "RDMAV_DRIVERS" => Some("/old/libmetaroce:mlx5".into()),
            _ => None,
        };
        let all = variables(&libraries(), &DeviceOptions::default(), present);
        assert_eq!(all[0], ("LD_PRELOAD", "/l/libmetaroce_shim.so /x/libfoo.so /y/libbar.so".into()));
        assert_eq!(all[1], ("RDMAV_DRIVERS", "/d/libmetaroce:mlx5".into()));
        assert_eq!(all.len(), 2);
    }

    #[test]
    fn variables__do_not_hide_ibv_drivers() {
        let all = variables(&libraries(), &DeviceOptions::default(), |name| {
            (name == "IBV_DRIVERS").then(|| "siw;rxe".into())
        });
        assert_eq!(all[0].1, "/l/libmetaroce_shim.so");
        assert_eq!(all[1].1, "/d/libmetaroce:siw:rxe");
    }

    #[test]
    fn options__become_variables() {
        let options = DeviceOptions {
            planes: Some("lo".to_owned()),
            loss: Some(fraction("1%").unwrap()),
            delay_us: Some(7),
            ..DeviceOptions::default()
        };
        let all: Vec<(&str, String)> = options.variables();
        let want = [("METAROCE_PLANES", "lo"), ("METAROCE_LOSS", "0.01"), ("METAROCE_DELAY_US", "7")];
        assert_eq!(all, want.map(|(name, value)| (name, value.to_owned())));
    }

    #[test]
    fn fraction__takes_shares_and_percent_only() {
        assert_eq!(fraction("0.5"), Ok(Fraction(0.5)));
        assert_eq!(fraction("100%"), Ok(Fraction(1.0)));
        for text in ["1.5", "-0.1", "101%", "x", "", "NaN"] {
            assert!(fraction(text).is_err(), "{text}");
        }
    }

    #[test]
    fn export_line__quotes_for_the_shell() {
        assert_eq!(export_line("A", OsStr::new("b'c d")), b"export A='b'\\''c d'\n");
    }
}
