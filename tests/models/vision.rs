//! Models of images, sound and both with text.

use crate::Excluded;
use crate::harness::Case;

pub(crate) const EXCLUDED: Excluded = &[];

pub(crate) fn cases() -> Vec<Case> {
    Vec::new()
}
