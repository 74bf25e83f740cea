//! Rules no compiler checks: file length, arrows between crates, a core without clock and I/O, nothing unfinished.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::workspace::Workspace;

/// Longest source file, lines. When one would pass that, it is two things.
const LINES_MAX: usize = 700;
const SOURCE_EXTENSIONS: [&str; 8] = ["rs", "c", "h", "py", "sh", "lua", "toml", "md"];

/// Workspace crates each crate may use, whatever the kind of dependency. Crates below test-apps may use everything
/// and are used by nothing else.
const ARROWS: [(&str, &[&str]); 11] = [
    ("metaroce-proto", &[]),
    ("metaroce-config", &[]),
    ("metaroce-stat", &[]),
    ("rdma-core-sys", &[]),
    ("metaroce-engine", &["metaroce-proto", "metaroce-config", "metaroce-stat"]),
    ("metaroce-ext-abi", &[]),
    ("metaroce-ext", &["metaroce-ext-abi", "rdma-core-sys"]),
    (
        "metaroce-provider",
        &["metaroce-engine", "metaroce-ext-abi", "metaroce-proto", "metaroce-config", "rdma-core-sys"],
    ),
    ("metaroce-shim", &["metaroce-config", "rdma-core-sys"]),
    ("metaroce-cli", &["metaroce-config", "metaroce-stat"]),
    ("xtask", &[]),
];

/// What the sans-IO core must not name: time, chance and the network come in as arguments.
const CORE_FORBIDDEN: [&str; 7] =
    ["std::time::Instant", "SystemTime", "std::thread", "UdpSocket", "std::fs", "std::env", "RandomState"];

/// Marks of unfinished work, split so that this file does not contain them.
const UNFINISHED: [&str; 4] = [
    concat!("todo", "!("),
    concat!("unimplemented", "!("),
    concat!("#[ig", "nore"),
    concat!("allow(dead", "_code)"),
];

/// Every breach found, one line each.
pub fn breaches(workspace: &Workspace) -> Vec<String> {
    let mut found = arrow_breaches(&workspace.metadata);
    for path in sources(&workspace.root) {
        let shown = path.strip_prefix(&workspace.root).unwrap_or(&path).to_owned();
        match fs::read_to_string(&path) {
            Ok(text) => found.extend(file_breaches(&shown, &text)),
            Err(error) => found.push(format!("{}: {error}", shown.display())),
        }
    }
    found
}

fn file_breaches(path: &Path, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut breach = |line: usize, what: String| found.push(format!("{}:{line}: {what}", path.display()));
    let is_rust = path.extension().is_some_and(|extension| extension == "rs");
    let prose = path.extension().is_some_and(|extension| extension == "md");
    let lines = text.lines().count();
    if lines > LINES_MAX && !prose {
        breach(lines, format!("{lines} lines, more than {LINES_MAX}: probably two things"));
    }
    if is_rust && !text.lines().take(3).any(|line| line.starts_with("//!") || line.starts_with("// ")) {
        breach(1, "no sentence of purpose at the top".to_owned());
    }
    let core = path.starts_with("provider/proto/src");
    for (index, line) in text.lines().enumerate() {
        if is_rust {
            for mark in UNFINISHED.iter().filter(|mark| line.contains(**mark)) {
                breach(index + 1, format!("`{mark}` marks unfinished or silenced work"));
            }
        }
        let code = !line.trim_start().starts_with("//");
        for name in CORE_FORBIDDEN.iter().filter(|name| core && code && line.contains(**name)) {
            breach(index + 1, format!("the sans-IO core names `{name}`"));
        }
    }
    if path == Path::new("provider/proto/src/lib.rs") && !text.contains("#![forbid(unsafe_code)]") {
        breach(1, "the core does not forbid unsafe code".to_owned());
    }
    found
}

/// Dependencies between workspace crates that design or table do not allow.
fn arrow_breaches(metadata: &Value) -> Vec<String> {
    let packages = metadata["packages"].as_array().map(Vec::as_slice).unwrap_or_default();
    let is_test_app =
        |package: &Value| package["manifest_path"].as_str().is_some_and(|p| p.contains("/test-apps/"));
    let name_of = |package: &Value| package["name"].as_str().unwrap_or_default().to_owned();
    let names: Vec<String> = packages.iter().map(name_of).collect();
    let mut found = Vec::new();
    for package in packages.iter().filter(|package| !is_test_app(package)) {
        let name = name_of(package);
        let Some((_, allowed)) = ARROWS.iter().find(|(from, _)| *from == name) else {
            found.push(format!("crate {name} is not in the table of arrows (tidy.rs)"));
            continue;
        };
        let dependencies = package["dependencies"].as_array().map(Vec::as_slice).unwrap_or_default();
        let internal =
            dependencies.iter().filter_map(|d| d["name"].as_str()).filter(|d| names.iter().any(|n| n == d));
        found.extend(
            internal
                .filter(|used| !allowed.contains(used))
                .map(|used| format!("crate {name} must not use {used}")),
        );
    }
    found
}

/// All text sources below `root`, without hidden and build directories.
pub fn sources(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut pending = vec![root.to_owned()];
    while let Some(dir) = pending.pop() {
        for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let Ok(kind) = entry.file_type() else { continue };
            if name.starts_with('.') || name == "target" {
                continue;
            }
            let is_source =
                entry.path().extension().is_some_and(|e| SOURCE_EXTENSIONS.iter().any(|s| e == *s));
            if kind.is_dir() {
                pending.push(entry.path());
            } else if kind.is_file() && is_source {
                found.push(entry.path());
            }
        }
    }
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn package(name: &str, path: &str, uses: &[&str]) -> Value {
        let dependencies: Vec<Value> = uses.iter().map(|used| json!({ "name": used })).collect();
        json!({ "name": name, "manifest_path": path, "dependencies": dependencies })
    }

    #[test]
    fn arrow_breaches__finds_reversed_and_unknown() {
        let metadata = json!({ "packages": [
            package("metaroce-proto", "/r/provider/proto/Cargo.toml", &["metaroce-engine", "bitvec"]),
            package("metaroce-engine", "/r/provider/engine/Cargo.toml", &["metaroce-proto"]),
            package("stranger", "/r/stranger/Cargo.toml", &[]),
            package("metaroce-bench", "/r/test-apps/bench/Cargo.toml", &["metaroce-engine"]),
        ]});
        let found = arrow_breaches(&metadata);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("metaroce-proto must not use metaroce-engine"));
        assert!(found[1].contains("stranger"));
    }

    #[test]
    fn file_breaches__finds_each_kind() {
        let check = |path: &str, text: &str| file_breaches(Path::new(path), text).len();
        assert_eq!(check("a.rs", "//! Purpose.\nfn a() {}\n"), 0);
        assert_eq!(check("a.rs", "fn a() {}\n"), 1);
        assert_eq!(check("a.rs", &format!("//! P.\nfn a() {{ {}) }}\n", UNFINISHED[0])), 1);
        assert_eq!(check("provider/proto/src/a.rs", "//! P.\nuse std::time::Instant;\n"), 1);
        assert_eq!(check("provider/engine/src/a.rs", "//! P.\nuse std::time::Instant;\n"), 0);
        assert_eq!(check("a.rs", &format!("//! P.\n{}", "\n".repeat(LINES_MAX))), 1);
    }
}
