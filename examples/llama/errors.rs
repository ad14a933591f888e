//! What went wrong, in words: every cause once, and what to do about it.

use std::path::Path;

use candle_ipc_cache::AttachError;
use candle_ipc_cache::protocol::Refusal;

/// An error and its causes, but for those that the words before have told already.
pub(crate) fn told(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Why there was no attaching, and how the entry comes to be there if it is missing. `path` is its checkpoint, as far
/// as that is known.
pub(crate) fn not_attached(error: AttachError, path: Option<&Path>) -> anyhow::Error {
    let AttachError::Refused {
        entry,
        code: Refusal::NoEntry | Refusal::OtherDevice,
        ..
    } = &error
    else {
        return error.into();
    };
    let what = path.map_or("MODEL".into(), |path| path.display().to_string());
    let load = format!("candle-cache load {what} --name {}", entry.name);
    anyhow::anyhow!("{error}; to load it: `{load} --device {}`", entry.device)
}
