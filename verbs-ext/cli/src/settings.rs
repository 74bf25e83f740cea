//! `metaroce config`: every setting with its variable, default, range and present value.

use std::process::ExitCode;

use metaroce_config::{Setting, settings};
use serde_json::{Value, json};

use crate::{device_config, output};

/// Options of `metaroce config`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

/// Prints the settings; 1 when the present configuration is wrong.
pub fn run(args: &Args) -> ExitCode {
    let text = if args.json {
        let all: Vec<Value> = settings().iter().map(setting_json).collect();
        format!("{}\n", Value::Array(all))
    } else {
        all_text()
    };
    for name in device_config::misspelt() {
        output::tell(format_args!("warning: {name} is no setting"));
    }
    let usual = match metaroce_config::load() {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            output::tell(error);
            ExitCode::FAILURE
        }
    };
    output::end(text, usual)
}

fn all_text() -> String {
    let mut text = format!(
        "Set these in the environment, or their keys in {} (TOML).\n\n",
        metaroce_config::DEFAULT_CONFIG_PATH
    );
    settings().iter().for_each(|setting| text += &setting_text(setting));
    text + "METAROCE_LIBDIR\n    Where the metaroce command looks for its libraries instead of beside itself.\n"
}

fn present(setting: &Setting) -> Option<String> {
    std::env::var_os(setting.name).map(|value| value.to_string_lossy().into_owned())
}

fn setting_text(setting: &Setting) -> String {
    let mut text = setting.name.to_owned();
    if let Some(key) = setting.key() {
        text += &format!(" (key {key})");
    }
    text += &format!("\n    {}\n    takes {}", setting.help, setting.range);
    if !setting.default.is_empty() {
        text += &format!("; default {}", setting.default);
    }
    if let Some(value) = present(setting) {
        text += &format!("; now {value}");
    }
    text + "\n"
}

fn setting_json(setting: &Setting) -> Value {
    json!({ "variable": setting.name, "key": setting.key(), "default": setting.default, "range": setting.range,
        "help": setting.help, "environment": present(setting) })
}
