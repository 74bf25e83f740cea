//! Making, finding, repairing and reclaiming trees in a scratch directory.

use super::*;

/// A private directory that is removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("metaroce-store-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Scratch(runtime_directory(&path).unwrap())
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(&self.0).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn entries(content: &str) -> Vec<Entry> {
    let entry = |path: &str, kind| Entry { path: path.into(), kind };
    vec![
        entry("sys/class/file", Kind::File(content.into())),
        entry("sys/class/link", Kind::Link("file".into())),
        entry("sys/class/empty", Kind::Dir),
    ]
}

/// Builds a tree as a process that is gone afterwards.
fn build_and_die(scratch: &Scratch, content: &str) -> PathBuf {
    let path = scratch.0.join(format!("sysfs-{:016x}", hash(&entries(content))));
    drop(build(&scratch.0, &path, &entries(content)).unwrap());
    path
}

#[test]
fn in_directory__is_found_again_and_readable() {
    let scratch = Scratch::new("again");
    let first = in_directory(&scratch.0, &entries("x")).unwrap();
    let inode = fs::metadata(&first).unwrap().ino();
    let second = in_directory(&scratch.0, &entries("x")).unwrap();
    assert_eq!((first.clone(), inode), (second.clone(), fs::metadata(&second).unwrap().ino()));
    assert_eq!(fs::read_to_string(first.join("sys/class/link")).unwrap(), "x");
    assert!(is_there(first.as_os_str().as_bytes()));
    assert!(!is_there(scratch.0.as_os_str().as_bytes()));
}

#[test]
fn in_directory__another_content_is_another_tree_and_both_are_kept_while_held() {
    let scratch = Scratch::new("other");
    let a = in_directory(&scratch.0, &entries("a")).unwrap();
    let b = in_directory(&scratch.0, &entries("b")).unwrap();
    assert_ne!(a, b);
    assert!(a.exists() && b.exists());
}

#[test]
fn in_directory__reclaims_what_dead_processes_left() {
    let scratch = Scratch::new("dead");
    let dead = build_and_die(&scratch, "dead");
    fs::create_dir_all(scratch.0.join("tmp-1-2-3/sys/class")).unwrap();
    fs::write(scratch.0.join("unrelated"), "").unwrap();
    let alive = in_directory(&scratch.0, &entries("alive")).unwrap();
    assert!(!dead.exists());
    assert_eq!(scratch.names(), [alive.file_name().unwrap().to_str().unwrap(), "unrelated"]);
}

#[test]
fn in_directory__repairs_a_tree_that_a_cleaner_went_through() {
    let scratch = Scratch::new("cleaned");
    let path = build_and_die(&scratch, "x");
    fs::remove_file(path.join("sys/class/file")).unwrap();
    assert_eq!(in_directory(&scratch.0, &entries("x")).unwrap(), path);
    assert!(is_complete(&path, &entries("x")));
    assert_eq!(scratch.names().len(), 1);
}

#[test]
fn in_directory__many_at_once_agree() {
    let scratch = Scratch::new("race");
    std::thread::scope(|scope| {
        let makers: Vec<_> = (0..8)
            .map(|i| {
                let directory = &scratch.0;
                scope.spawn(move || {
                    for round in 0..20 {
                        let content = format!("{}", (i + round) % 3);
                        let path = in_directory(directory, &entries(&content)).unwrap();
                        assert_eq!(fs::read_to_string(path.join("sys/class/file")).unwrap(), content);
                    }
                })
            })
            .collect();
        makers.into_iter().for_each(|maker| maker.join().unwrap());
    });
    assert_eq!(scratch.names().len(), 3);
}

#[test]
fn runtime_directory__is_private_and_not_a_link() {
    let scratch = Scratch::new("private");
    let wide = scratch.0.join("wide");
    DirBuilder::new().mode(0o777).create(&wide).unwrap();
    runtime_directory(&wide).unwrap();
    assert_eq!(fs::metadata(&wide).unwrap().mode() & 0o777, 0o700);
    let link = scratch.0.join("link");
    symlink(&wide, &link).unwrap();
    assert!(runtime_directory(&link).is_err());
}
