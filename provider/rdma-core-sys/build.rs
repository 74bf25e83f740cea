//! Generates the bindings from the installed headers; names the packages when they are missing.

use std::env;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;

const REMEDY: &str = "rdma-core-sys needs the libibverbs headers and libclang: \
install the packages libibverbs-dev and libclang-dev";

fn main() {
    for input in ["build.rs", "wrapper.h"] {
        println!("cargo::rerun-if-changed={input}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));

    let verbs = bindgen::Builder::default()
        .header("wrapper.h")
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .derive_default(true)
        .generate_comments(false)
        .allowlist_type("(ibv|verbs|_ibv|ib_uverbs)_.*")
        .allowlist_var("(IBV|IB_UVERBS)_.*")
        // Opaque; ours is in lib.rs.
        .blocklist_type("verbs_ex_private")
        .raw_line("use crate::verbs_ex_private;")
        // libc's types, so that its pthread functions take them.
        .blocklist_type("pthread_(mutex|cond)_t|timespec|__pthread.*")
        .raw_line("use libc::{pthread_cond_t, pthread_mutex_t, timespec};");
    generate(verbs, out.join("verbs.rs"));
}

/// Writes the bindings or ends the build with one sentence that names the packages.
fn generate(builder: bindgen::Builder, to: PathBuf) {
    // bindgen panics when it finds no libclang; its message is replaced by ours.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| builder.generate()));
    std::panic::set_hook(hook);
    let cause = match outcome {
        Ok(Ok(bindings)) => match bindings.write_to_file(&to) {
            Ok(()) => return,
            Err(e) => e.to_string(),
        },
        Ok(Err(e)) => e.to_string().lines().next().unwrap_or_default().to_owned(),
        Err(_) => "libclang was not found".to_owned(),
    };
    println!("cargo::error={REMEDY} ({cause})");
    std::process::exit(1);
}
