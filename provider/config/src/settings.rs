//! Every setting: its variable, its key in the file, its default, its range, and how its text is parsed.

use crate::{ConfigError, Impairment};

/// One setting, for help texts and for `metaroce doctor`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting {
    /// Environment variable, for example `METAROCE_PATHS`.
    pub name: &'static str,
    /// Default as it would be written; empty when the default is chosen from the host.
    pub default: &'static str,
    /// What is accepted, in words.
    pub range: &'static str,
    /// What it does, in one sentence.
    pub help: &'static str,
}

impl Setting {
    /// The key in the configuration file (`paths` for `METAROCE_PATHS`); `None` for the variable that names the file.
    #[must_use]
    pub fn key(&self) -> Option<String> {
        if self.name == CONFIG.name {
            return None;
        }
        self.name.strip_prefix(PREFIX).map(str::to_ascii_lowercase)
    }
}

/// Every setting there is, in the order in which a help text should list them.
#[must_use]
pub fn settings() -> &'static [Setting] {
    const ALL: &[Setting] = &[
        CONFIG, PLANES, PLANE_RATE, BASE_PORT, PATHS, SEGMENT, BURST, RCVBUF, GSO, LOSS, CM_LOSS, REORDER,
        DUP, DELAY_US, SEED, LOG,
    ];
    ALL
}

/// Names of `METAROCE_` variables that are no setting (probably misspelt), among `names`.
///
/// They are no error for the device, because other parts of the product have variables of their own.
pub fn unknown_variables<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    names.filter(|name| name.starts_with(PREFIX) && !settings().iter().any(|s| s.name == *name)).collect()
}

/// The values of all settings but the planes, at their defaults until [`Values::set`] changes them.
#[derive(Debug, Clone)]
pub(crate) struct Values {
    pub planes: Option<String>,
    pub planes_place: String,
    /// Mb/s per plane; one alone is for all of them, none: as the links say.
    pub plane_rates: Vec<u64>,
    pub base_port: u16,
    pub paths: u8,
    pub segment: u32,
    pub burst: u8,
    pub rcvbuf: u32,
    pub gso: bool,
    pub impairment: Impairment,
    pub cm_loss: Option<f64>,
    pub log: String,
}

impl Default for Values {
    fn default() -> Self {
        let mut values = Values {
            planes: None,
            planes_place: String::new(),
            plane_rates: Vec::new(),
            base_port: 0,
            paths: 0,
            segment: 0,
            burst: 0,
            rcvbuf: 0,
            gso: false,
            impairment: Impairment::default(),
            cm_loss: None,
            log: String::new(),
        };
        for setting in settings().iter().filter(|s| !s.default.is_empty()) {
            values.set(setting, "default", setting.default).expect("the table's own defaults are in range");
        }
        values
    }
}

impl Values {
    /// Takes the text of one setting; `place` says where it was written, for the error.
    pub(crate) fn set(&mut self, setting: &Setting, place: &str, text: &str) -> Result<(), ConfigError> {
        let text = text.trim();
        let bad = || ConfigError::BadValue {
            place: place.to_owned(),
            value: text.to_owned(),
            range: setting.range,
        };
        let fraction = || text.parse::<f64>().ok().filter(|f| (0.0..=1.0).contains(f)).ok_or_else(bad);
        let number = |low: u64, high: u64| {
            text.parse::<u64>().ok().filter(|n| (low..=high).contains(n)).ok_or_else(bad)
        };
        let number32 = |low: u32, high: u32| number(low.into(), high.into()).map(|n| n as u32);
        match setting.name {
            "METAROCE_PLANES" => {
                self.planes = Some(text.to_owned());
                place.clone_into(&mut self.planes_place);
            }
            "METAROCE_PLANE_RATE" => {
                let rate = |text: &str| {
                    text.trim().parse::<u64>().ok().filter(|mbps| *mbps <= RATE_MBPS_MAX).ok_or_else(bad)
                };
                self.plane_rates = text.split(',').map(rate).collect::<Result<_, _>>()?;
            }
            "METAROCE_BASE_PORT" => self.base_port = number32(1024, 64512)? as u16,
            "METAROCE_PATHS" => self.paths = number32(1, 16)? as u8,
            "METAROCE_SEGMENT" => self.segment = number32(512, 65000)?,
            "METAROCE_BURST" => self.burst = number32(0, 64)? as u8,
            "METAROCE_RCVBUF" => self.rcvbuf = number32(16384, 1 << 30)?,
            "METAROCE_GSO" => self.gso = switch(text).ok_or_else(bad)?,
            "METAROCE_LOSS" => self.impairment.loss = fraction()?,
            "METAROCE_CM_LOSS" => self.cm_loss = Some(fraction()?),
            "METAROCE_REORDER" => self.impairment.reorder = fraction()?,
            "METAROCE_DUP" => self.impairment.dup = fraction()?,
            "METAROCE_DELAY_US" => self.impairment.delay_us = number32(0, 10_000_000)?,
            "METAROCE_SEED" => self.impairment.seed = number(0, u64::MAX)?,
            "METAROCE_LOG" => text.clone_into(&mut self.log),
            "METAROCE_CONFIG" => {}
            other => unreachable!("setting {other} has no value"),
        }
        Ok(())
    }
}

fn switch(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "on" | "yes" => Some(true),
        "0" | "false" | "off" | "no" => Some(false),
        _ => None,
    }
}

/// 3.2 Tb/s: the largest rate that hints can name is above it.
const RATE_MBPS_MAX: u64 = 3_200_000;

const PREFIX: &str = "METAROCE_";

const CONFIG: Setting = Setting {
    name: "METAROCE_CONFIG",
    default: "",
    range: "the path of a TOML file",
    help: "Configuration file, read instead of /etc/metaroce.toml; variables override it.",
};
const PLANES: Setting = Setting {
    name: "METAROCE_PLANES",
    default: "",
    range: "a comma-separated list of interfaces or local addresses, each with an optional label (eth0, rail1=eth1)",
    help: "Network planes of the device in order; the interface of the default route when unset.",
};
const PLANE_RATE: Setting = Setting {
    name: "METAROCE_PLANE_RATE",
    default: "",
    range: "a number of Mb/s up to 3200000 for every plane, or a comma-separated list with one for each; 0: without limit",
    help: "Rate of the planes' links, by which sending is paced and shared out; what the network cards say when unset.",
};
const BASE_PORT: Setting = Setting {
    name: "METAROCE_BASE_PORT",
    default: "24576",
    range: "a number from 1024 to 64512",
    help: "First UDP port of the device's 1024 slots; the same on all hosts that talk to each other.",
};
const PATHS: Setting = Setting {
    name: "METAROCE_PATHS",
    default: "4",
    range: "a number from 1 to 16",
    help: "Paths (UDP source ports) per plane and connection.",
};
const SEGMENT: Setting = Setting {
    name: "METAROCE_SEGMENT",
    default: "4224",
    range: "a number of bytes from 512 to 65000",
    help: "Upper bound of one packet's UDP payload; 4224 carries 4096 bytes of data. The route's MTU bounds it too.",
};
const BURST: Setting = Setting {
    name: "METAROCE_BURST",
    default: "0",
    range: "a number of packets from 1 to 64, or 0 for adaptive",
    help: "Packets sent in one burst on one path.",
};
const RCVBUF: Setting = Setting {
    name: "METAROCE_RCVBUF",
    default: "4194304",
    range: "a number of bytes from 16384 to 1073741824",
    help: "Receive buffer to ask the kernel for; it may grant less (net.core.rmem_max).",
};
const GSO: Setting = Setting {
    name: "METAROCE_GSO",
    default: "1",
    range: "1 or 0",
    help: "Use UDP segmentation and receive offload where the kernel has them.",
};
const LOSS: Setting = Setting {
    name: "METAROCE_LOSS",
    default: "0",
    range: "a fraction from 0.0 to 1.0 (0.01 is 1 %)",
    help: "Fraction of packets to drop, after segmentation, acknowledgements included.",
};
const CM_LOSS: Setting = Setting {
    name: "METAROCE_CM_LOSS",
    default: "",
    range: "a fraction from 0.0 to 1.0 (0.01 is 1 %)",
    help: "Fraction of connection management packets to drop; METAROCE_LOSS when unset.",
};
const REORDER: Setting = Setting {
    name: "METAROCE_REORDER",
    default: "0",
    range: "a fraction from 0.0 to 1.0 (0.01 is 1 %)",
    help: "Fraction of packets to hold back behind later ones.",
};
const DUP: Setting = Setting {
    name: "METAROCE_DUP",
    default: "0",
    range: "a fraction from 0.0 to 1.0 (0.01 is 1 %)",
    help: "Fraction of packets to send twice.",
};
const DELAY_US: Setting = Setting {
    name: "METAROCE_DELAY_US",
    default: "0",
    range: "a number of microseconds from 0 to 10000000",
    help: "Delay added to every packet.",
};
const SEED: Setting = Setting {
    name: "METAROCE_SEED",
    default: "0",
    range: "a number from 0 to 18446744073709551615",
    help: "Seed of the impairment pattern; the same seed gives the same pattern for the same packets.",
};
const LOG: Setting = Setting {
    name: "METAROCE_LOG",
    default: "warn",
    range: "off, error, warn, info, debug, trace, or a filter such as metaroce_engine=debug",
    help: "What the device writes to stderr.",
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings__defaults_are_in_range_and_names_unique() {
        let values = Values::default();
        assert_eq!((values.base_port, values.paths, values.segment), (24576, 4, 4096 + 128));
        assert_eq!((values.burst, values.rcvbuf, values.gso), (0, 4 << 20, true));
        for (i, a) in settings().iter().enumerate() {
            assert!(settings()[i + 1..].iter().all(|b| a.name != b.name), "{} twice", a.name);
            assert!(a.help.ends_with('.') && !a.range.is_empty());
        }
    }

    #[test]
    fn settings__every_one_is_taken() {
        let mut values = Values::default();
        for setting in settings() {
            values.set(setting, "test", "0").ok();
        }
    }

    #[test]
    fn settings__bad_number_names_itself() {
        for (setting, text) in [(&LOSS, "1.5"), (&LOSS, "NaN"), (&PATHS, "0"), (&SEED, "-1"), (&GSO, "maybe")]
        {
            let error = Values::default().set(setting, setting.name, text).unwrap_err().to_string();
            assert!(error.contains(setting.name) && error.contains(text), "{error}");
        }
    }

    #[test]
    fn unknown_variables__finds_misspelt_only() {
        let names = ["METAROCE_LOSS", "METAROCE_LOS", "PATH"];
        assert_eq!(unknown_variables(names.into_iter()), ["METAROCE_LOS"]);
    }
}
