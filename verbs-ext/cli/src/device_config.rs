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
