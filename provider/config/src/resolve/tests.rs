//! Resolution with injected environment, file and interfaces.

use super::*;

/// An interface that is up, with an index derived from its name.
pub(crate) fn interface(name: &str, addrs: &[&str]) -> Interface {
    Interface {
        name: name.to_owned(),
        index: name.bytes().map(u32::from).sum(),
        mtu: 1500,
        mac: [2, 0, 0, 0, 0, 1],
        addrs: addrs.iter().map(|a| a.parse().unwrap()).collect(),
        up: true,
        running: true,
        loopback: name == "lo",
    }
}

/// A device with one plane per interface.
pub(crate) fn device(interfaces: &[Interface]) -> DeviceConfig {
    let names = interfaces.iter().map(|i| i.name.as_str()).collect::<Vec<_>>().join(",");
    let net = NetView { interfaces: interfaces.to_vec(), default_route: None };
    resolve(&|name| (name == "METAROCE_PLANES").then(|| names.clone()), None, &net).unwrap()
}

fn host() -> NetView {
    let interfaces = vec![
        interface("lo", &["127.0.0.1", "::1"]),
        interface("down0", &[]),
        interface("eth0", &["fe80::1", "2001:db8::1", "192.0.2.1", "192.0.2.2"]),
        interface("eth1", &["198.51.100.1"]),
    ];
    NetView { interfaces, default_route: None }
}

fn with(env: &[(&str, &str)]) -> Result<DeviceConfig, ConfigError> {
    resolve(&|name| env.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned()), None, &host())
}

fn with_file(text: &str) -> Result<DeviceConfig, ConfigError> {
    let file = ConfigFile { path: "/etc/metaroce.toml".into(), text: text.to_owned() };
    resolve(&|name| (name == "METAROCE_PATHS").then(|| "7".to_owned()), Some(&file), &host())
}

fn names(config: &DeviceConfig) -> Vec<(&str, &str)> {
    config.planes.iter().map(|p| (p.label.as_str(), p.ifname.as_str())).collect()
}

#[test]
fn default__prefers_the_default_route_then_the_first_up_then_loopback() {
    let none = |_: &str| None;
    let mut net = host();
    assert_eq!(names(&resolve(&none, None, &net).unwrap()), [("eth0", "eth0")]);
    net.default_route = Some("eth1".into());
    assert_eq!(names(&resolve(&none, None, &net).unwrap()), [("eth1", "eth1")]);
    net.default_route = Some("down0".into());
    assert_eq!(names(&resolve(&none, None, &net).unwrap()), [("eth0", "eth0")]);
    net.interfaces.truncate(2);
    assert_eq!(names(&resolve(&none, None, &net).unwrap()), [("lo", "lo")]);
    net.interfaces[0].up = false;
    assert!(matches!(resolve(&none, None, &net), Err(ConfigError::NoInterface)));
}

#[test]
fn planes__addresses_are_in_gid_order() {
    let config = with(&[("METAROCE_PLANES", "eth0")]).unwrap();
    let addrs: Vec<String> = config.planes[0].addrs.iter().map(IpAddr::to_string).collect();
    assert_eq!(addrs, ["192.0.2.1", "192.0.2.2", "2001:db8::1", "fe80::1"]);
    let lo = with(&[("METAROCE_PLANES", "lo")]).unwrap();
    assert_eq!(lo.planes[0].addrs[0].to_string(), "127.0.0.1");
}

#[test]
fn planes__labels_addresses_and_order() {
    let config = with(&[("METAROCE_PLANES", " rail1=eth1 , 192.0.2.2,fe80::1%eth0 ")]).unwrap();
    assert_eq!(names(&config), [("rail1", "eth1"), ("eth0", "eth0"), ("eth0.2", "eth0")]);
    assert_eq!(config.planes[1].addrs, ["192.0.2.2".parse::<IpAddr>().unwrap()]);
}

#[test]
fn planes__mistakes_name_themselves() {
    for (list, named) in [
        ("eth0,eth9", "`eth9`"),
        ("192.0.2.77", "`192.0.2.77`"),
        ("fe80::1%eth1", "`fe80::1%eth1`"),
        ("down0", "`down0`, which has no IP address"),
        ("eth0,eth0", "`eth0` twice"),
        ("eth0,192.0.2.1", "`192.0.2.1` twice"),
        ("a=eth0,a=eth1", "`a` twice"),
        ("eth0,,eth1", "`eth0,,eth1`"),
        ("=eth0", "`=eth0`"),
    ] {
        let error = with(&[("METAROCE_PLANES", list)]).unwrap_err().to_string();
        assert!(error.contains(named) && error.contains("METAROCE_PLANES"), "{list}: {error}");
        assert!(!error.contains('\n'), "{error}");
    }
    let error = with(&[("METAROCE_PLANES", "eth9")]).unwrap_err().to_string();
    assert!(error.contains("lo, down0, eth0, eth1"), "{error}");
}

#[test]
fn env__sets_every_value_and_empty_is_unset() {
    let config = with(&[
        ("METAROCE_PLANES", ""),
        ("METAROCE_BASE_PORT", "30000"),
        ("METAROCE_PATHS", "8"),
        ("METAROCE_SEGMENT", "1200"),
        ("METAROCE_BURST", "15"),
        ("METAROCE_RCVBUF", "212992"),
        ("METAROCE_GSO", "0"),
        ("METAROCE_LOSS", "0.01"),
        ("METAROCE_REORDER", "0.02"),
        ("METAROCE_DUP", "0.03"),
        ("METAROCE_DELAY_US", "50"),
        ("METAROCE_SEED", "18446744073709551615"),
        ("METAROCE_LOG", "debug"),
    ])
    .unwrap();
    let expected = DeviceConfig {
        planes: device(&[host().interfaces[2].clone()]).planes,
        base_port: 30000,
        paths_per_plane: 8,
        segment_bytes_max: 1200,
        burst_packets_max: 15,
        rcvbuf_bytes: 212_992,
        gso: false,
        impairment: crate::Impairment { loss: 0.01, reorder: 0.02, dup: 0.03, delay_us: 50, seed: u64::MAX },
        cm_loss: 0.01,
        log: "debug".into(),
    };
    assert_eq!(config, expected);
}

#[test]
fn file__is_read_and_the_environment_wins() {
    let config =
        with_file("planes = [\"eth1\", \"r=eth0\"]\npaths = 2\nloss = 0\ndup = 0.5\ngso = false\nseed = 3\n")
            .unwrap();
    assert_eq!(names(&config), [("eth1", "eth1"), ("r", "eth0")]);
    assert_eq!((config.paths_per_plane, config.gso, config.impairment.dup), (7, false, 0.5));
    assert_eq!(config.impairment.seed, 3);
}

#[test]
fn file__mistakes_name_themselves() {
    for (text, named) in [
        ("plane = \"eth0\"", "unknown key `plane`"),
        ("config = \"x\"", "unknown key `config`"),
        ("paths = 99", "`paths` in /etc/metaroce.toml is `99`"),
        ("planes = \"eth7\"", "`eth7`"),
        ("seed = -1", "`-1`"),
        ("planes = [1]", "`planes`"),
        ("[loss]\nx = 1", "`loss`"),
        ("paths = 1\npaths = = 2", "line 2"),
    ] {
        let error = with_file(text).unwrap_err().to_string();
        assert!(error.contains(named) && error.contains("/etc/metaroce.toml"), "{text}: {error}");
        assert!(!error.contains('\n'), "{error}");
    }
}

#[test]
fn file__missing_is_an_error_only_when_named() {
    let nowhere = Path::new("/nonexistent/metaroce.toml");
    assert!(ConfigFile::read_if_present(nowhere).unwrap().is_none());
    let error = ConfigFile::read(nowhere).unwrap_err().to_string();
    assert!(error.contains("/nonexistent/metaroce.toml") && error.contains("METAROCE_CONFIG"), "{error}");
}

#[test]
fn file__that_never_ends_is_refused() {
    let dir = std::env::temp_dir().join(format!("metaroce-config-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let (fifo, large, fits) = (dir.join("fifo"), dir.join("large"), dir.join("fits"));
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    std::fs::write(&large, vec![b'#'; (1 << 20) + 1]).unwrap();
    std::fs::write(&fits, vec![b'#'; 1 << 20]).unwrap();
    for path in [Path::new("/dev/zero"), Path::new("/"), &fifo, &large] {
        let error = ConfigFile::read(path).unwrap_err().to_string();
        assert!(error.contains(path.to_str().unwrap()) && error.contains("METAROCE_CONFIG"), "{error}");
        assert!(!error.contains('\n'), "{error}");
    }
    assert_eq!(ConfigFile::read(&fits).unwrap().text.len(), 1 << 20);
    std::fs::remove_dir_all(&dir).unwrap();
}
