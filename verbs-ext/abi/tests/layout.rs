//! The C compiler's view of `metaroce.h` and the Rust structures are the same, as C99 and as C++17, without a warning.

#![expect(non_snake_case, reason = "tests are named subject__case")]

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use metaroce_ext_abi::*;

/// Static assertions, in C, of what Rust says.
fn assertions() -> String {
    let mut text =
        String::from("#include <stddef.h>\n#include <metaroce/metaroce.h>\n#include <metaroce/metaroce.h>\n");
    text.push_str(
        "#ifdef __cplusplus\n#define CHECK(x) static_assert(x, #x)\n#else\n\
         #define JOIN2(a, b) a##b\n#define JOIN(a, b) JOIN2(a, b)\n\
         #define CHECK(x) typedef char JOIN(check_, __LINE__)[(x) ? 1 : -1] __attribute__((unused))\n#endif\n",
    );
    fn of<T: Layout>(text: &mut String) {
        writeln!(text, "CHECK(sizeof(struct {}) == {});", T::NAME, size_of::<T>()).unwrap();
        let mut end = 0;
        for (field, offset, size) in T::FIELDS {
            writeln!(text, "CHECK(offsetof(struct {}, {field}) == {offset});", T::NAME).unwrap();
            writeln!(text, "CHECK(sizeof(((struct {} *)0)->{field}) == {size});", T::NAME).unwrap();
            assert_eq!(end, *offset, "a hole before {}.{field}", T::NAME);
            end = offset + size;
        }
        assert_eq!(end, size_of::<T>(), "a hole at the end of {}", T::NAME);
    }
    of::<Version>(&mut text);
    of::<DeviceAttr>(&mut text);
    of::<Plane>(&mut text);
    of::<Connection>(&mut text);
    of::<Path>(&mut text);
    of::<QueuePair>(&mut text);
    of::<SnapshotInfo>(&mut text);
    of::<Event>(&mut text);
    let constants = [
        ("METAROCE_API_MAJOR", u64::from(API.0)),
        ("METAROCE_API_MINOR", u64::from(API.1)),
        ("METAROCE_CAP_PLANE_ADMIN", caps::PLANE_ADMIN),
        ("METAROCE_CAP_ENTROPY", caps::ENTROPY),
        ("METAROCE_CAP_SNAPSHOT", caps::SNAPSHOT),
        ("METAROCE_CAP_EVENTS", caps::EVENTS),
        ("METAROCE_EVENT_PATH", event::PATH.into()),
        ("METAROCE_EVENT_LINK", event::LINK.into()),
        ("METAROCE_EVENT_ADMIN", event::ADMIN.into()),
        ("METAROCE_ADMIN_UP", admin::UP.into()),
        ("METAROCE_ADMIN_DRAIN", admin::DRAIN.into()),
        ("METAROCE_ADMIN_DOWN", admin::DOWN.into()),
    ];
    for (name, value) in constants {
        writeln!(text, "CHECK({name} == {value});").unwrap();
    }
    let lists: [(&str, &[&str]); 3] =
        [("PATH", &PATH_STATES), ("CONNECTION", &CONNECTION_STATES), ("CAUSE", &CAUSES)];
    for (kind, names) in lists {
        for (value, name) in names.iter().enumerate() {
            writeln!(text, "CHECK(METAROCE_{kind}_{} == {value});", name.to_uppercase()).unwrap();
        }
    }
    text
}

#[test]
fn header__agrees_with_rust_in_c99_and_cpp17() {
    let dir = std::env::temp_dir().join(format!("metaroce-layout-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let include = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../include");
    for (compiler, standard, file) in [("gcc", "c99", "check.c"), ("g++", "c++17", "check.cc")] {
        let source = dir.join(file);
        fs::write(&source, assertions()).unwrap();
        let mut command = Command::new(compiler);
        command.args([
            &format!("-std={standard}"),
            "-Wall",
            "-Wextra",
            "-Wpedantic",
            "-Werror",
            "-fsyntax-only",
            "-I",
        ]);
        let done = command.arg(&include).arg(&source).output().expect("a C and a C++ compiler");
        assert!(done.status.success(), "{compiler}: {}", String::from_utf8_lossy(&done.stderr));
    }
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn number_of__tells_unknown_names() {
    assert_eq!(number_of(&PATH_STATES, "left"), 3);
    assert_eq!(number_of(&PATH_STATES, "nowhere"), u32::MAX);
}
