//! A copy in memory, for scale: what moving the bytes alone costs when the cache holds them, and when it does not.

use std::io;
use std::time::{Duration, Instant};

use serde_json::json;

/// Options of the copy.
#[derive(clap::Args, Clone)]
pub struct Args {
    /// Bytes of the source and of the destination.
    #[arg(long, default_value_t = 65_536, value_parser = clap::value_parser!(u32).range(64..=1 << 30))]
    buffer: u32,
    /// How long to copy.
    #[arg(long, default_value_t = 0.3)]
    seconds: f64,
    /// One JSON object instead of text.
    #[arg(long)]
    json: bool,
}

/// Copies one buffer into another, again and again.
pub fn run(args: &Args) -> io::Result<()> {
    let size = args.buffer as usize;
    let source = vec![1u8; size];
    let mut destination = vec![2u8; size];
    let (mut copies, begin) = (0u64, Instant::now());
    let elapsed = loop {
        for _ in 0..(1 << 20) / size.min(1 << 20) {
            std::hint::black_box(&mut destination).copy_from_slice(std::hint::black_box(&source));
            copies += 1;
        }
        let elapsed = begin.elapsed();
        if elapsed >= Duration::from_secs_f64(args.seconds) {
            break elapsed;
        }
    };
    let gbps = copies as f64 * size as f64 * 8.0 / elapsed.as_secs_f64() / 1e9;
    if args.json {
        println!("{}", json!({"bench": "copy", "gbps": gbps, "buffer": size}));
    } else {
        println!("copy: {gbps:.1} Gb/s ({size} B)");
    }
    Ok(())
}
