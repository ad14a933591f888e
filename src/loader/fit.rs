//! Prefixes that are off: what the names that a model asks for begin with, and what the checkpoint's begin with.
//! Worked out from the names that are missing and the names that nobody asked for, which end alike.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use super::naming::Renaming;
use super::suggest::{Names, heads};

/// Most prefixes that are looked for.
const MOST: usize = 4;

impl Names {
    /// What would have to stand for what at the beginning of names, for most of the `missing` ones (with their shapes,
    /// where they are known) to be found. `asked` are all names that the model asked for. The first that matches a
    /// name is to be applied to it, and no other.
    pub(crate) fn fit(
        &self,
        missing: &[(&str, Option<&[usize]>)],
        asked: &[Cow<'_, str>],
    ) -> Vec<Renaming> {
        let manifest = self.manifest();
        // What a model finds as it is, it does not also mean by another name.
        let used: HashSet<usize> = asked.iter().filter_map(|a| manifest.position(a)).collect();
        let mut left = missing.to_vec();
        let mut found = Vec::new();
        while found.len() < MOST && !left.is_empty() {
            let mut votes: HashMap<(&str, &str), usize> = HashMap::new();
            for (name, shape) in &left {
                for pair in self.candidates(name, *shape, &used) {
                    *votes.entry(pair).or_default() += 1;
                }
            }
            let best = votes.into_iter().max_by(|a, b| {
                let shorter = |pair: (&str, &str)| pair.0.len() + pair.1.len();
                let by_count = a.1.cmp(&b.1);
                let by_length = by_count.then_with(|| shorter(b.0).cmp(&shorter(a.0)));
                by_length.then_with(|| b.0.cmp(&a.0))
            });
            let Some(((from, to), count)) = best else {
                break;
            };
            let alone = asked.len() == 1;
            if count * 2 < left.len() || (count < 2 && !alone) {
                break;
            }
            let renaming = Renaming {
                from: from.into(),
                to: to.into(),
            };
            let fits = |name: &str| {
                let held = renaming.apply(name);
                held.is_some_and(|held| manifest.position(&held).is_some())
            };
            let (fitted, rest): (Vec<_>, Vec<_>) = left.iter().partition(|(name, _)| fits(name));
            left = rest;
            found.push((renaming, fitted));
        }
        let breaks = |renaming: &Renaming| {
            let mut held = asked.iter().filter(|a| manifest.position(a).is_some());
            held.any(|a| {
                let renamed = renaming.apply(a);
                renamed.is_some_and(|name| manifest.position(&name).is_none())
            })
        };
        let alone = found.len() == 1;
        let mut fit = Vec::new();
        for (renaming, fitted) in found {
            if renaming.from.is_empty() && (!alone || breaks(&renaming)) {
                fit.extend(by_first_segment(
                    &renaming,
                    fitted.iter().map(|(name, _)| *name),
                ));
            } else {
                fit.push(renaming);
            }
        }
        // The longest first, so that none hides another.
        fit.sort_by(|a, b| b.from.len().cmp(&a.from.len()).then(a.from.cmp(&b.from)));
        fit
    }

    /// The beginnings in which `name` differs from the unused names of its shape that end most like it.
    fn candidates<'a>(
        &'a self,
        name: &'a str,
        shape: Option<&[usize]>,
        used: &HashSet<usize>,
    ) -> Vec<(&'a str, &'a str)> {
        let manifest = self.manifest();
        let mut longest = 0;
        let mut pairs = Vec::new();
        for position in self.ending_like(name) {
            if used.contains(&position) {
                continue;
            }
            let entry = &manifest.tensors[manifest.tensor_at(position)];
            let held = entry.shape.iter().map(|d| *d as usize);
            if shape.is_some_and(|asked| !held.eq(asked.iter().copied())) {
                continue;
            }
            let held = manifest.name_at(position);
            let (wrong, right) = heads(name, held);
            let tail = &name[wrong.len()..];
            let whole = wrong.is_empty() || right.is_empty();
            if tail.is_empty() || !(whole || tail.contains('.')) || tail.len() < longest {
                continue;
            }
            if tail.len() > longest {
                longest = tail.len();
                pairs.clear();
            }
            pairs.push((wrong, right));
        }
        pairs.sort_unstable();
        pairs.dedup();
        pairs
    }
}

/// A prefix as renames of the first segments that the names have which it fits.
fn by_first_segment<'a>(prefix: &Renaming, names: impl Iterator<Item = &'a str>) -> Vec<Renaming> {
    let mut firsts: Vec<&str> = names
        .map(|name| name.find('.').map_or(name, |dot| &name[..=dot]))
        .collect();
    firsts.sort_unstable();
    firsts.dedup();
    firsts.truncate(MOST);
    let renamings = firsts.into_iter().map(|first| Renaming {
        from: first.into(),
        to: format!("{}{first}", prefix.to),
    });
    renamings.collect()
}
