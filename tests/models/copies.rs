//! What a model copies of its weights and keeps, found out by changing the weights under it.
//!
//! A tensor that the constructor or a forward pass has copied for good is one whose later change does not
//! reach the outputs as a change before the constructor does. Copies that end with a forward pass are not seen.

use std::collections::{BTreeMap, HashMap};

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;

use crate::harness::{Bits, Build, Weights, bits, outcome};

/// Names of tensors, by what the model does with them.
#[derive(Default)]
pub(crate) struct Copies {
    /// The constructor made something of its own from them.
    pub(crate) constructor: Vec<String>,
    /// Those of them that the built model does not read any more.
    pub(crate) let_go: Vec<String>,
    /// The first forward pass made the last use of them.
    pub(crate) first_forward: Vec<String>,
    /// No output depends on them. `None`: not looked for.
    pub(crate) unused: Option<Vec<String>>,
}

/// When weights are changed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    Before,
    Built,
    Ran,
}

impl When {
    /// Forward passes that are needed to see the change.
    fn passes(self) -> usize {
        if self == When::Ran { 2 } else { 1 }
    }
}

/// The bits of the outputs of one forward pass, or what went wrong.
type Seen = Result<Vec<Bits>, String>;

/// New values of tensors.
type Changes<'a> = [(&'a String, Tensor)];

/// Changes each weight in turn, before the constructor, after it and after the first forward pass.
pub(crate) fn of_each(build: Build, weights: &Weights) -> Result<Copies> {
    let model = Model::new(build, weights)?;
    let wanted = model.run(1, None)?;
    wanted.clone().map_err(anyhow::Error::msg)?;
    let again = model.run(2, None)?;
    again
        .clone()
        .map_err(|e| anyhow::anyhow!("a second forward pass: {e}"))?;
    let mut copies = Copies::default();
    let mut unused = Vec::new();
    for (name, tensor) in weights.iter().filter(|(_, t)| t.dtype().is_float()) {
        // A change that rounding hides is tried again with one that nothing hides.
        let changes = [
            [(name, tensor.affine(-1., 0.5)?)],
            [(name, tensor.affine(f64::NAN, 0.)?)],
        ];
        let run =
            |when: When, change: usize| model.run(when.passes(), Some((when, &changes[change])));
        let before = run(When::Before, 0)?;
        if before == wanted && run(When::Before, 1)? == wanted {
            unused.push(name.clone());
            continue;
        }
        let built = run(When::Built, 0)?;
        let let_go = built == wanted && run(When::Built, 1)? == wanted;
        if let_go || built != before {
            copies.constructor.push(name.clone());
        }
        if let_go {
            copies.let_go.push(name.clone());
        } else if run(When::Ran, 0)? == again && run(When::Ran, 1)? == again {
            copies.first_forward.push(name.clone());
        }
    }
    copies.unused = Some(unused);
    Ok(copies)
}

/// Changes kinds of weights: each to find what is let go, then all others together and, where that shows a copy, ever
/// smaller groups of them.
pub(crate) fn of_groups(build: Build, weights: &Weights) -> Result<Copies> {
    let model = Model::new(build, weights)?;
    let wanted = model.run(1, None)?;
    let mut kinds: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (name, tensor) in weights.iter().filter(|(_, t)| t.dtype().is_float()) {
        // Variances stay positive and nothing saturates, so that a change of one shows beside those of others.
        let change = (name, tensor.affine(1.0625, 0.)?);
        kinds
            .entry(kind(name, tensor.rank()))
            .or_default()
            .push(change);
    }
    let all: Vec<_> = kinds.values().flatten().cloned().collect();
    let changed = model.run(1, Some((When::Before, &all)))?;
    ensure!(changed != wanted, "changed weights do not show");
    ensure!(
        changed.is_ok_and(|outputs| outputs.iter().all(finite)),
        "changed weights hide each other"
    );

    let kinds: Vec<_> = kinds.values().map(Vec::as_slice).collect();
    let (mut let_go, mut read) = (Vec::new(), Vec::new());
    for kind in kinds {
        let is_wanted = |when| anyhow::Ok(model.run(1, Some((when, kind)))? == wanted);
        if is_wanted(When::Built)? && !is_wanted(When::Before)? {
            let_go.push(kind);
        } else {
            read.push(kind);
        }
    }
    let kept = model.showing_later(&read, When::Built)?;
    read.retain(|kind| !kept.iter().any(|kept| std::ptr::eq(*kept, *kind)));
    let first_forward = model.showing_later(&read, When::Ran)?;
    let names = |kinds: &[&Changes<'_>]| {
        let names = kinds.iter().copied().flatten();
        names.map(|(name, _)| (*name).clone()).collect()
    };
    Ok(Copies {
        constructor: names(&[let_go.clone(), kept].concat()),
        let_go: names(&let_go),
        first_forward: names(&first_forward),
        unused: None,
    })
}

/// The end of a name, without numbers, and a rank: `bn.running_var`, of 1. What layers are made of, not where they are.
fn kind(name: &str, rank: usize) -> (String, usize) {
    let words = name.split('.').filter(|part| part.parse::<u32>().is_err());
    let words: Vec<_> = words.collect();
    (words[words.len().saturating_sub(2)..].join("."), rank)
}

/// Whether all values of an output in F32 are finite.
fn finite((dtype, _, values): &Bits) -> bool {
    let finite = |bits: &u64| f32::from_bits(*bits as u32).is_finite();
    *dtype != DType::F32 || values.iter().all(finite)
}

/// A model to be built from weights that can be changed.
struct Model {
    build: Build,
    held: HashMap<String, Tensor>,
}

impl Model {
    fn new(build: Build, weights: &Weights) -> Result<Self> {
        let copy = |(name, tensor): (&String, &Tensor)| Ok((name.clone(), tensor.copy()?));
        let held = weights.iter().map(copy).collect::<Result<_>>()?;
        Ok(Self { build, held })
    }

    /// Of `kinds`, those whose change at `when` does not show as a change before the constructor does.
    fn showing_later<'a>(
        &self,
        kinds: &[&'a Changes<'a>],
        when: When,
    ) -> Result<Vec<&'a Changes<'a>>> {
        let changes: Vec<_> = kinds.iter().copied().flatten().cloned().collect();
        let passes = when.passes();
        let before = self.run(passes, Some((When::Before, &changes)))?;
        if changes.is_empty() || self.run(passes, Some((when, &changes)))? == before {
            return Ok(Vec::new());
        }
        if kinds.len() == 1 {
            return Ok(kinds.to_vec());
        }
        let (these, those) = kinds.split_at(kinds.len() / 2);
        let mut showing = self.showing_later(these, when)?;
        showing.extend(self.showing_later(those, when)?);
        Ok(showing)
    }

    /// The last of one or two forward passes of a new model, with weights changed meanwhile and put back afterwards.
    fn run(&self, passes: usize, change: Option<(When, &Changes<'_>)>) -> Result<Seen> {
        let mut originals = Vec::new();
        let mut at = |now: When| -> Result<()> {
            for (name, values) in change
                .iter()
                .filter(|(when, _)| *when == now)
                .flat_map(|c| c.1)
            {
                let tensor = &self.held[*name];
                originals.push((tensor, tensor.copy()?));
                overwrite(tensor, values)?;
            }
            Ok(())
        };
        at(When::Before)?;
        let vb = VarBuilder::from_tensors(self.held.clone(), DType::F32, &Device::Cpu);
        let seen = match outcome(|| (self.build)(vb)) {
            Ok(mut forward) => {
                at(When::Built)?;
                let first = outcome(|| bits(&forward()?));
                at(When::Ran)?;
                match passes {
                    1 => first,
                    _ => outcome(|| bits(&forward()?)),
                }
            }
            Err(e) => Err(e),
        };
        for (tensor, values) in originals {
            overwrite(tensor, &values)?;
        }
        Ok(seen)
    }
}

/// Writes `values` into the memory of `tensor`, where everything that shares it sees them.
fn overwrite(tensor: &Tensor, values: &Tensor) -> Result<()> {
    let (tensor, values) = (tensor.flatten_all()?, values.flatten_all()?);
    Ok(tensor.slice_set(&values, 0, 0)?)
}
