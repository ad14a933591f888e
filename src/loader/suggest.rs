//! Nearest names for one that the cache does not hold. Nothing is ever mapped to them: people read them.
//! Two sorted orders find what shares the longest tail or head, so that the work does not grow with the model.

use std::fmt;
use std::sync::{Arc, OnceLock};

use rayon::prelude::*;

use crate::manifest::Manifest;

/// Names looked at on each side of where the missing one would stand, in each order.
const WINDOW: usize = 16;
/// Names offered.
const OFFERED: usize = 3;
/// Bytes of a missing name that are compared; a longer one is no tensor's.
const COMPARED: usize = 1024;
/// Below this similarity (0 to 1) a name is not worth offering.
const SIMILAR: f64 = 0.5;

/// Every name of a manifest, in orders that make near ones neighbours.
#[derive(Debug)]
pub(crate) struct Names {
    manifest: Arc<Manifest>,
    by_tail: OnceLock<Vec<u32>>,
}

impl Names {
    pub(crate) fn new(manifest: Arc<Manifest>) -> Self {
        Self {
            manifest,
            by_tail: OnceLock::new(),
        }
    }

    /// What to say beside "cannot find tensor `called`", which is `asked` in the checkpoint. Worked out when it is
    /// displayed, because models that try one name after another throw most of these away.
    pub(super) fn hint(self: &Arc<Self>, asked: &str, called: &str) -> Hint {
        Hint {
            names: self.clone(),
            asked: shortened(asked).to_string(),
            called: (called != asked).then(|| shortened(called).to_string()),
        }
    }

    pub(super) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The positions of the held names that share the longest endings with `asked`, and of some others.
    pub(super) fn ending_like(&self, asked: &str) -> impl Iterator<Item = usize> {
        let by_tail = self.by_tail();
        let at = by_tail.partition_point(|i| reversed(self.name(*i), asked).is_lt());
        let around = at.saturating_sub(WINDOW)..by_tail.len().min(at + WINDOW);
        by_tail[around].iter().map(|i| *i as usize)
    }

    /// The held names nearest to `asked`, best first, at most [`OFFERED`].
    pub(super) fn nearest(&self, asked: &str) -> Vec<&str> {
        let mut near: Vec<&str> = Vec::with_capacity(6 * WINDOW);
        let around = |at: usize, len: usize| at.saturating_sub(WINDOW)..len.min(at + WINDOW);
        near.extend(self.ending_like(asked).map(|at| self.manifest.name_at(at)));
        let tensors = &self.manifest.tensors;
        let at = tensors.partition_point(|t| t.name.as_str() < asked);
        near.extend(
            tensors[around(at, tensors.len())]
                .iter()
                .map(|t| t.name.as_str()),
        );
        let aliases = &self.manifest.aliases;
        let at = aliases.partition_point(|a| a.name.as_str() < asked);
        near.extend(
            aliases[around(at, aliases.len())]
                .iter()
                .map(|a| a.name.as_str()),
        );
        near.sort_unstable();
        near.dedup();
        let mut scored: Vec<(f64, &str)> = near
            .into_iter()
            .map(|name| (likeness(asked, name), name))
            .filter(|(score, _)| *score >= SIMILAR)
            .collect();
        scored.sort_by(|a, b| b.0.total_cmp(&a.0).then_with(|| a.1.cmp(b.1)));
        scored
            .into_iter()
            .take(OFFERED)
            .map(|(_, name)| name)
            .collect()
    }

    /// The head, dot included, that every held name has; empty where they have none in common.
    fn common_prefix(&self) -> &str {
        let mut names = self.manifest.names();
        let Some(first) = names.next() else { return "" };
        names.fold(head_of(first), |common, name| {
            let shared = common.bytes().zip(name.bytes());
            let shared = shared.take_while(|(a, b)| a == b).count();
            let dot = common.as_bytes()[..shared].iter().rposition(|b| *b == b'.');
            dot.map_or("", |dot| &common[..=dot])
        })
    }

    fn by_tail(&self) -> &[u32] {
        self.by_tail.get_or_init(|| {
            let count = self.manifest.tensors.len() + self.manifest.aliases.len();
            let mut order: Vec<u32> = (0..count as u32).collect();
            order.par_sort_unstable_by(|a, b| reversed(self.name(*a), self.name(*b)));
            order
        })
    }

    fn name(&self, i: u32) -> &str {
        self.manifest.name_at(i as usize)
    }

    /// The held name that a missing output head is tied to in models that tie it.
    pub(super) fn tied(&self, asked: &str) -> Option<&str> {
        if !["lm_head.weight", "output.weight"]
            .iter()
            .any(|head| is_tail(asked, head))
        {
            return None;
        }
        ["embed_tokens.weight", "token_embd.weight", "wte.weight"]
            .iter()
            .find_map(|embedding| self.manifest.names().find(|name| is_tail(name, embedding)))
    }
}

/// As much of a name as is compared.
fn shortened(name: &str) -> &str {
    let end = (0..=COMPARED.min(name.len()))
        .rev()
        .find(|i| name.is_char_boundary(*i))
        .unwrap_or(0);
    &name[..end]
}

/// Everything before the last dot, and the dot.
fn head_of(name: &str) -> &str {
    name.rfind('.').map_or("", |dot| &name[..=dot])
}

/// Whether `tail` is all of `name`, or all that follows one of its dots.
fn is_tail(name: &str, tail: &str) -> bool {
    name.strip_suffix(tail)
        .is_some_and(|head| head.is_empty() || head.ends_with('.'))
}

fn reversed(a: &str, b: &str) -> std::cmp::Ordering {
    a.bytes().rev().cmp(b.bytes().rev())
}

/// Two whole names that differ by a head alone come before any spelling.
fn likeness(asked: &str, held: &str) -> f64 {
    let spelling = strsim::normalized_damerau_levenshtein(asked, held);
    if is_tail(asked, held) || is_tail(held, asked) {
        return 2.0 + spelling;
    }
    let (wrong, right) = heads(asked, held);
    // A shared tail of two segments or more says more than letters do.
    let tail = &asked[wrong.len()..];
    if right != wrong && tail.contains('.') {
        1.0 + tail.matches('.').count() as f64 / 64.0 + spelling / 64.0
    } else {
        spelling
    }
}

/// What stands before the longest tail of whole segments that both names share, dots included.
pub(super) fn heads<'a>(asked: &'a str, held: &'a str) -> (&'a str, &'a str) {
    let mut shared = 0;
    for (a, b) in asked.rsplit('.').zip(held.rsplit('.')) {
        if a != b {
            break;
        }
        shared += a.len() + 1;
    }
    let cut = |name: &'a str| &name[..(name.len() + 1 - shared).min(name.len())];
    (cut(asked), cut(held))
}

/// What people should read beside candle's "cannot find tensor".
pub(super) struct Hint {
    names: Arc<Names>,
    asked: String,
    /// What the model calls it, where that is something else.
    called: Option<String>,
}

impl fmt::Display for Hint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let asked = &self.asked;
        write!(f, "the cache holds no tensor `{asked}`")?;
        if let Some(called) = &self.called {
            write!(f, " (asked for as `{called}`)")?;
        }
        let near = self.names.nearest(asked);
        match near.split_first() {
            None => write!(f, ", nor one with a name like it")?,
            Some((best, rest)) => {
                write!(f, "; nearest: `{best}`")?;
                for name in rest {
                    write!(f, ", `{name}`")?;
                }
                write_prefix(f, asked, best, self.names.common_prefix())?;
            }
        }
        if let Some(embedding) = self.names.tied(asked) {
            write!(
                f,
                "; a model with tied embeddings (`tie_word_embeddings` in its config) has no head of its own and uses \
                 `{embedding}`"
            )?;
        }
        Ok(())
    }
}

/// Says how the prefix would have to change, where the rest of the name is right.
fn write_prefix(f: &mut fmt::Formatter<'_>, asked: &str, best: &str, common: &str) -> fmt::Result {
    let (wrong, right) = heads(asked, best);
    if wrong.len() == asked.len() || wrong == right {
        return Ok(());
    }
    let shown = |head: &str| match head {
        "" => "none".to_string(),
        head => format!("`{head}`"),
    };
    write!(
        f,
        "; only the prefix differs: asked with {}, held with {}",
        shown(wrong),
        shown(right)
    )?;
    if common.is_empty() || asked.starts_with(common) {
        return Ok(());
    }
    write!(f, "; every name in the cache begins with `{common}`")?;
    // The head that fits may be shorter than what all names have in common.
    if wrong.is_empty() {
        write!(f, ": use `IpcConfig::prefix(\"{right}\")`")?;
    }
    Ok(())
}
