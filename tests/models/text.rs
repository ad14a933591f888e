//! Models of text.

use crate::Excluded;
use crate::harness::Case;

#[path = "text_decoders.rs"]
mod decoders;

pub(crate) const EXCLUDED: Excluded = &[];

pub(crate) fn cases() -> Vec<Case> {
    decoders::cases()
}
