//! What a run may be told; both ends of a case get the same options.

use std::path::PathBuf;

use clap::Args;
use serde::{Deserialize, Serialize};

/// Options of every mode. What a mode does not use it ignores.
#[derive(Args, Serialize, Deserialize, Debug, Clone)]
pub struct Options {
    /// Device to open; the first one by default.
    #[arg(long)]
    pub device: Option<String>,
    /// Index of the GID both ends use.
    #[arg(long, default_value_t = 0)]
    pub gid_index: u8,
    /// Seed of everything that is chance; printed, random by default.
    #[arg(long)]
    pub seed: Option<u64>,
    /// QPs of the cases with many.
    #[arg(long, default_value_t = 8)]
    pub qps: usize,
    /// Path MTU of the near end, in bytes.
    #[arg(long, default_value_t = 1024, value_parser = path_mtu)]
    pub mtu_a: u32,
    /// Path MTU of the far end, in bytes.
    #[arg(long, default_value_t = 1024, value_parser = path_mtu)]
    pub mtu_b: u32,
    /// Multiplies how often the cases of chance repeat.
    #[arg(long, default_value_t = 1)]
    pub rounds: usize,
    /// 64 MiB messages too.
    #[arg(long)]
    pub big: bool,
    /// How long the cases that last for a time last (poll: 2, idle: 10 by default).
    #[arg(long)]
    pub seconds: Option<u64>,
    /// QP counts of the scale mode.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 64, 4096])]
    pub counts: Vec<usize>,
    /// Seconds without any completion that count as a hang.
    #[arg(long, default_value_t = 15)]
    pub stall: u64,
    /// Multiplies every case's time limit (slow machines, heavy impairment).
    #[arg(long, default_value_t = 1)]
    pub patience: u64,
    /// The device's command that prints its counters with `stat --json` (scale mode).
    #[arg(long)]
    pub metaroce: Option<PathBuf>,
}

fn path_mtu(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(mtu @ (256 | 512 | 1024 | 2048 | 4096)) => Ok(mtu),
        _ => Err("a path MTU is 256, 512, 1024, 2048 or 4096".into()),
    }
}
