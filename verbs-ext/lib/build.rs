//! The name and the symbol version that programs record when they are linked with the library.

fn main() {
    println!("cargo::rerun-if-changed=metaroce.map");
    let map = concat!(env!("CARGO_MANIFEST_DIR"), "/metaroce.map");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libmetaroce.so.1");
    println!("cargo::rustc-cdylib-link-arg=-Wl,--version-script={map}");
    // rustc's own list asks for the functions by the names that `.symver` has replaced.
    println!("cargo::rustc-cdylib-link-arg=-Wl,--undefined-version");
}
