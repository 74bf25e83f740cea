//! What the command prints: one way out, which a reader that went away or a full disk does not turn into a panic.

use std::io::{ErrorKind, Write};
use std::process::ExitCode;

/// Writes `text` to standard output. An error is the exit code to end with: quietly with `usual`, what the command would
/// have ended with, when the reader is gone (`| head`); with 1 and a sentence otherwise.
pub fn print(text: impl AsRef<[u8]>, usual: ExitCode) -> Result<(), ExitCode> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_ref()).and_then(|()| out.flush()).map_err(|error| {
        if error.kind() == ErrorKind::BrokenPipe {
            return usual;
        }
        tell(format_args!("cannot write to standard output ({error})"));
        ExitCode::FAILURE
    })
}

/// [`print()`] as the last thing a command does.
pub fn end(text: impl AsRef<[u8]>, usual: ExitCode) -> ExitCode {
    print(text, usual).map_or_else(|code| code, |()| usual)
}

/// Writes a sentence to standard error, if that is open.
pub fn tell(sentence: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "metaroce: {sentence}");
}
