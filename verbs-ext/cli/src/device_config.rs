//! The configuration a program would get, with options laid over the environment.

use std::ffi::OsString;
use std::path::Path;

use metaroce_config::{ConfigError, ConfigFile, DEFAULT_CONFIG_PATH, DeviceConfig, NetView};

/// Resolves the configuration as the device will, `variables` before the environment.
pub fn with_variables(variables: &[(&'static str, OsString)]) -> Result<DeviceConfig, ConfigError> {
    let env = |name: &str| {
        let over = variables.iter().find(|(set, _)| *set == name).map(|(_, value)| value.clone());
        over.or_else(|| std::env::var_os(name)).map(|value| value.to_string_lossy().into_owned())
    };
    let file = match env("METAROCE_CONFIG").filter(|path| !path.is_empty()) {
        Some(path) => Some(ConfigFile::read(Path::new(&path))?),
        None => ConfigFile::read_if_present(Path::new(DEFAULT_CONFIG_PATH))?,
    };
    metaroce_config::resolve(&env, file.as_ref(), &NetView::of_this_host()?)
}

/// METAROCE_ variables in the environment that nothing reads: probably misspelt.
pub fn misspelt() -> Vec<String> {
    /// Read by this command alone.
    const OURS: [&str; 1] = ["METAROCE_LIBDIR"];
    let names: Vec<String> = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()).collect();
    let unknown = metaroce_config::unknown_variables(names.iter().map(String::as_str));
    unknown.into_iter().filter(|name| !OURS.contains(name)).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sample_file__has_only_keys_and_values_the_device_takes() {
        let sample = include_str!("../../../packaging/metaroce.toml");
        // Every line that is a setting behind a comment mark, but the planes: those depend on the machine.
        let is_setting =
            |line: &&str| line.contains(" = ") && !line.starts_with(' ') && !line.starts_with("planes");
        let lines: Vec<&str> =
            sample.lines().filter_map(|line| line.strip_prefix('#')).filter(is_setting).collect();
        assert!(lines.len() >= 5, "{lines:?}");
        let text = format!("planes = \"lo\"\n{}\n", lines.join("\n"));
        let file = ConfigFile { path: "metaroce.toml".into(), text };
        let view = NetView::of_this_host().unwrap();
        let config = metaroce_config::resolve(&|_| None, Some(&file), &view).unwrap();
        assert_eq!((config.impairment.loss, config.impairment.seed), (0.01, 1));
    }
}
