//! Just enough of ELF to say whether a program can see `metaroce0`: read from the file, nothing is loaded.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const PT_DYNAMIC: u32 = 2;
const PT_INTERP: u32 = 3;
const SHT_DYNSYM: u32 = 11;
const DT_NEEDED: u64 = 1;
const DT_RPATH: u64 = 15;
const DT_RUNPATH: u64 = 29;

/// What was read of an ELF file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Elf {
    /// Machine number (62 = x86-64).
    pub machine: u16,
    /// Dynamic loader; `None` in static programs and in libraries.
    pub interpreter: Option<String>,
    /// It has a dynamic section.
    pub dynamic: bool,
    /// Libraries it is linked to.
    pub needed: Vec<String>,
    /// RPATH and RUNPATH directories, `$ORIGIN` as written.
    pub run_paths: Vec<String>,
    /// Dynamic symbols it defines.
    pub exports: Vec<String>,
}

/// Parses a 64-bit little-endian ELF file; `None` for anything else, broken files included.
pub fn parse(bytes: &[u8]) -> Option<Elf> {
    let file = Reader(bytes);
    if bytes.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let mut elf = Elf { machine: file.u16(18)?, ..Elf::default() };
    elf.exports = exports(file).unwrap_or_default();
    let mut strings = None;
    let mut dynamic = Vec::new();
    for header in headers(file, file.u64(32)?, file.u16(54)?, file.u16(56)?) {
        let (offset, size) = (file.u64(header + 8)?, file.u64(header + 32)?);
        match file.u32(header)? {
            PT_INTERP => elf.interpreter = file.text(offset),
            PT_DYNAMIC => {
                elf.dynamic = true;
                dynamic = (0..size / 16).map_while(|i| entry(file, offset + i * 16)).collect();
            }
            _ => {}
        }
    }
    if let Some((_, address)) = dynamic.iter().find(|(tag, _)| *tag == 5) {
        strings = file_offset(file, *address);
    }
    for (tag, value) in dynamic {
        let Some(text) = strings.and_then(|base: u64| file.text(base.checked_add(value)?)) else { continue };
        match tag {
            DT_NEEDED => elf.needed.push(text),
            DT_RPATH | DT_RUNPATH => elf.run_paths.extend(text.split(':').map(str::to_owned)),
            _ => {}
        }
    }
    Some(elf)
}

/// A dynamic entry; `None` at the end of the table.
fn entry(file: Reader<'_>, offset: u64) -> Option<(u64, u64)> {
    let tag = file.u64(offset)?;
    (tag != 0).then_some(())?;
    Some((tag, file.u64(offset + 8)?))
}

/// File offset of a virtual address, by the loadable segments.
fn file_offset(file: Reader<'_>, address: u64) -> Option<u64> {
    headers(file, file.u64(32)?, file.u16(54)?, file.u16(56)?).find_map(|header| {
        let (offset, start, size) = (file.u64(header + 8)?, file.u64(header + 16)?, file.u64(header + 32)?);
        let within = address.checked_sub(start)?;
        (file.u32(header)? == 1 && within < size).then(|| offset.checked_add(within))?
    })
}

fn headers(_file: Reader<'_>, first: u64, size: u16, count: u16) -> impl Iterator<Item = u64> {
    (0..u64::from(count)).map_while(move |i| first.checked_add(i * u64::from(size)))
}

/// Names of the defined dynamic symbols, by the section headers (libraries keep them).
fn exports(file: Reader<'_>) -> Option<Vec<String>> {
    let (first, size, count) = (file.u64(40)?, file.u16(58)?, file.u16(60)?);
    let section = |index: u64| first.checked_add(index.checked_mul(u64::from(size))?);
    let table = headers(file, first, size, count).find(|at| file.u32(at + 4) == Some(SHT_DYNSYM))?;
    let strings = file.u64(section(u64::from(file.u32(table + 40)?))? + 24)?;
    let (offset, bytes) = (file.u64(table + 24)?, file.u64(table + 32)?);
    let symbols = (0..bytes / 24).map_while(|i| {
        let at = offset.checked_add(i * 24)?;
        Some((file.u32(at)?, file.u16(at + 6)?))
    });
    Some(
        symbols
            .filter(|(name, section)| *name != 0 && *section != 0)
            .filter_map(|(name, _)| file.text(strings.checked_add(u64::from(name))?))
            .collect(),
    )
}

/// Bounds-checked reads.
#[derive(Debug, Clone, Copy)]
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn bytes<const N: usize>(self, offset: u64) -> Option<[u8; N]> {
        let start = usize::try_from(offset).ok()?;
        self.0.get(start..start.checked_add(N)?)?.try_into().ok()
    }
    fn u16(self, offset: u64) -> Option<u16> {
        self.bytes(offset).map(u16::from_le_bytes)
    }
    fn u32(self, offset: u64) -> Option<u32> {
        self.bytes(offset).map(u32::from_le_bytes)
    }
    fn u64(self, offset: u64) -> Option<u64> {
        self.bytes(offset).map(u64::from_le_bytes)
    }
    fn text(self, offset: u64) -> Option<String> {
        let rest = self.0.get(usize::try_from(offset).ok()?..)?;
        let end = rest.iter().position(|&byte| byte == 0)?;
        Some(String::from_utf8_lossy(&rest[..end]).into_owned())
    }
}

/// The private ABI number N of a libibverbs whose code is inside this file (it holds the text `-rdmavN.so`).
pub fn embedded_verbs_abi(bytes: &[u8]) -> Option<u32> {
    let mark = b"-rdmav";
    let at = bytes.windows(mark.len()).position(|window| window == mark)?;
    let digits: String = bytes[at + mark.len()..]
        .iter()
        .take_while(|byte| byte.is_ascii_digit())
        .map(|&byte| byte as char)
        .collect();
    digits.parse().ok()
}

/// Finds a program as `execvp` does.
pub fn find_program(name: &Path) -> Option<PathBuf> {
    let usable = |path: &Path| path.metadata().is_ok_and(|meta| meta.is_file() && meta.mode() & 0o111 != 0);
    if name.components().count() > 1 || name.is_absolute() {
        return usable(name).then(|| name.to_owned());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|path| usable(path))
}

/// The interpreter of a `#!` script.
pub fn script_interpreter(bytes: &[u8]) -> Option<PathBuf> {
    let line = bytes.strip_prefix(b"#!")?.split(|&byte| byte == b'\n').next()?;
    let text = String::from_utf8_lossy(line);
    let mut words = text.split_whitespace();
    let first = Path::new(words.next()?);
    let by_env = first.file_name().is_some_and(|name| name == "env");
    if by_env {
        find_program(Path::new(words.find(|word| !word.starts_with('-'))?))
    } else {
        Some(first.to_owned())
    }
}

/// Why LD_PRELOAD cannot reach this program, as the end of a sentence that begins with its name.
pub fn preload_obstacle(path: &Path) -> Option<&'static str> {
    let caller = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
    if path.metadata().is_ok_and(|meta| changes_ids(meta.mode(), (meta.uid(), meta.gid()), caller)) {
        return Some("is set-user-ID or set-group-ID, so the loader ignores LD_PRELOAD");
    }
    let elf = parse(&read(path).ok()?)?;
    match &elf.interpreter {
        None => Some("is statically linked, so nothing can be loaded into it"),
        Some(loader) if loader.contains("musl") => Some("uses musl, and the shim is built for glibc"),
        Some(_) if elf.machine != own_machine() => Some("is built for another processor"),
        Some(_) => None,
    }
}

/// Whether a program of this mode and these owners (user, group) runs as somebody else than its caller: then the kernel
/// tells the loader to be careful, whoever the caller is (AT_SECURE; execve(2)).
fn changes_ids(mode: u32, owners: (u32, u32), caller: (u32, u32)) -> bool {
    // Without the group's right to execute, the bit stands for mandatory locking.
    let (set_user, set_group) = (mode & 0o4000 != 0, mode & 0o2010 == 0o2010);
    set_user && owners.0 != caller.0 || set_group && owners.1 != caller.1
}

/// ELF machine number of this build.
const fn own_machine() -> u16 {
    if cfg!(target_arch = "aarch64") { 183 } else { 62 }
}

/// Reads a program or library; nothing bigger than 1 GiB.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    const BYTES_MAX: u64 = 1 << 30;
    if fs::metadata(path)?.len() > BYTES_MAX {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    fs::read(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_ids__when_another_user_or_group_is_set() {
        const ROOT: (u32, u32) = (0, 0);
        const USER: (u32, u32) = (1000, 1000);
        assert!(!changes_ids(0o755, ROOT, USER));
        assert!(changes_ids(0o4755, ROOT, USER) && changes_ids(0o4755, USER, ROOT));
        assert!(!changes_ids(0o4755, USER, USER) && !changes_ids(0o4755, ROOT, ROOT));
        assert!(changes_ids(0o2755, ROOT, USER) && !changes_ids(0o2745, ROOT, USER));
    }

    #[test]
    fn parse__own_executable() {
        let bytes = read(&std::env::current_exe().unwrap()).unwrap();
        let elf = parse(&bytes).unwrap();
        assert!(elf.dynamic && elf.interpreter.is_some());
        assert!(elf.needed.iter().any(|name| name.starts_with("libc.so")));
        assert_eq!(elf.machine, own_machine());
    }

    #[test]
    fn parse__broken_files_are_none_or_partial_never_a_panic() {
        let bytes = read(&std::env::current_exe().unwrap()).unwrap();
        assert_eq!(parse(b"#!/bin/sh\n"), None);
        for cut in [0, 5, 17, 40, 63, 64, 100, 1000, bytes.len() / 2] {
            let _ = parse(&bytes[..cut]);
        }
        // A deterministic walk of single corrupted header bytes.
        let mut head = bytes[..bytes.len().min(1 << 16)].to_vec();
        for at in 0..256 {
            let old = std::mem::replace(&mut head[at], 0xff);
            let _ = parse(&head);
            head[at] = old;
        }
    }

    #[test]
    fn embedded_verbs_abi__reads_the_suffix() {
        assert_eq!(embedded_verbs_abi(b"xx%s-rdmav34.so\0"), Some(34));
        assert_eq!(embedded_verbs_abi(b"nothing"), None);
    }

    #[test]
    fn script_interpreter__direct_and_by_env() {
        assert_eq!(script_interpreter(b"#! /bin/sh -e\nx"), Some("/bin/sh".into()));
        let shell = script_interpreter(b"#!/usr/bin/env -S sh\n").unwrap();
        assert!(shell.ends_with("sh"));
        assert_eq!(script_interpreter(b"\x7fELF"), None);
    }
}
