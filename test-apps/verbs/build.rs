//! Binds the installed `<infiniband/verbs.h>` as a C program would see it: functions from libibverbs.so, and
//! the header's inline functions (post, poll, ibv_wr_*) compiled by the C compiler into this crate.

use std::env;
use std::path::PathBuf;

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let inline = out.join("inline.c");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-link-lib=dylib=ibverbs");
    bindgen::Builder::default()
        .header_contents("client.h", "#include <infiniband/verbs.h>\n")
        .allowlist_function("_*ibv_.*")
        .allowlist_type("ibv_.*")
        .allowlist_var("IBV_.*")
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .derive_default(true)
        .layout_tests(false)
        .generate_comments(false)
        .wrap_static_fns(true)
        .wrap_static_fns_path(&inline)
        .generate()
        .expect("<infiniband/verbs.h> (libibverbs-dev) and libclang (libclang-dev) are installed")
        .write_to_file(out.join("verbs.rs"))
        .expect("OUT_DIR is writable");
    // bindgen's wrapper file includes nothing for header_contents: the header comes by -include.
    cc::Build::new()
        .file(&inline)
        .flag("-include")
        .flag("infiniband/verbs.h")
        .warnings(false)
        .compile("verbs_inline");
}
