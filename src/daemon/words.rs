//! Names and texts from peers: what is taken, and what is kept of it.

use super::registry::Refused;
use crate::protocol::{EntryId, MAX_ENTRY_NAME, Refusal, clip};
use crate::shard::MAX_RANKS;

/// Refuses an entry whose name or role nobody could read or type, or of a rank that cannot be.
pub(super) fn check_entry(entry: &EntryId) -> Result<(), Refused> {
    check_word("name", &entry.name)?;
    check_word("role", &entry.role)?;
    match entry
        .shard
        .parts()
        .into_iter()
        .find(|(_, part)| !part.is_possible())
    {
        None => Ok(()),
        Some((name, part)) => Err(Refused::new(
            Refusal::BadRequest,
            format!(
                "there is no rank {part} ({name}): ranks run from 0, and there are 1 to {MAX_RANKS} of them"
            ),
        )),
    }
}

/// Refuses a word that is empty, too long, or would move a terminal's cursor.
pub(super) fn check_word(what: &str, word: &str) -> Result<(), Refused> {
    if word.is_empty() || word.len() > MAX_ENTRY_NAME || word.chars().any(char::is_control) {
        return Err(Refused::new(
            Refusal::BadRequest,
            format!(
                "an entry's {what} must have 1 to {MAX_ENTRY_NAME} bytes and no control characters, this one has {}",
                word.len()
            ),
        ));
    }
    Ok(())
}

/// A peer's text, cut, and without anything that a terminal would obey.
pub(super) fn printable(text: &str) -> String {
    let clean: String = text
        .chars()
        .map(|c| if c.is_control() && c != '\n' { ' ' } else { c })
        .collect();
    clip(&clean)
}
