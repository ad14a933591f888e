//! What a model copies of its weights and keeps, found out by changing the weights under it.
//!
//! A tensor that the constructor or a forward pass has copied for good is one whose later change does not
//! reach the outputs as a change before the constructor does. Copies that end with a forward pass are not seen.

use std::collections::{BTreeMap, HashMap};

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;

use crate::harness::{Bits, Build, Weights, bits, outcome};
use crate::table::pattern;

/// Names of tensors, by what the model does with them.
#[derive(Default)]
pub(crate) struct Copies {
    /// The constructor made something of its own from them.
    pub(crate) constructor: Vec<String>,
    /// Those of them that the built model does not read any more.
    pub(crate) let_go: Vec<String>,
    /// The first forward pass made the last use of them.
    pub(crate) first_forward: Vec<String>,
    /// No output depends on them.
    pub(crate) unused: Vec<String>,
}

/// When a weight is changed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    Before,
    Built,
    Ran,
}

/// The bits of the outputs of two forward passes, or what went wrong.
type Seen = [Result<Vec<Bits>, String>; 2];

/// Changes each weight in turn, before the constructor, after it and after the first forward pass.
/// `sampled`: one of each kind alone, and the others of its kind are taken to be like it.
pub(crate) fn census(build: Build, weights: &Weights, sampled: bool) -> Result<Copies> {
    let held: HashMap<String, Tensor> = weights
        .iter()
        .map(|(name, tensor)| Ok((name.clone(), tensor.copy()?)))
        .collect::<Result<_>>()?;
    let [wanted, again] = see(build, &held, None)?;
    wanted.clone().map_err(anyhow::Error::msg)?;
    again
        .clone()
        .map_err(|e| anyhow::anyhow!("a second forward pass: {e}"))?;
    let mut kinds: BTreeMap<_, Vec<&String>> = BTreeMap::new();
    for (name, tensor) in weights.iter().filter(|(_, t)| t.dtype().is_float()) {
        let kind = match sampled {
            true => (pattern(name), tensor.rank()),
            false => (name.clone(), 0),
        };
        kinds.entry(kind).or_default().push(name);
    }
    let mut copies = Copies::default();
    for names in kinds.values() {
        let (name, tensor) = (names[0], &weights[names[0]]);
        let all = || names.iter().copied().cloned();
        // A change that rounding hides is tried again with one that nothing hides.
        let changes = [tensor.affine(-1., 0.5)?, tensor.affine(f64::NAN, 0.)?];
        let shows = |when: When| -> Result<bool> {
            let (pass, plain) = match when {
                When::Ran => (1, &again),
                _ => (0, &wanted),
            };
            for change in &changes {
                if see(build, &held, Some((name, when, change)))?[pass] != *plain {
                    return Ok(true);
                }
            }
            Ok(false)
        };
        if !shows(When::Before)? {
            copies.unused.extend(all());
            continue;
        }
        let of = |when| see(build, &held, Some((name, when, &changes[0])));
        if of(When::Before)?[0] != of(When::Built)?[0] {
            copies.constructor.extend(all());
        }
        if !shows(When::Built)? {
            copies.let_go.extend(all());
        } else if !shows(When::Ran)? {
            copies.first_forward.extend(all());
        }
    }
    Ok(copies)
}

/// Builds the model and runs it twice, with one weight changed meanwhile and put back afterwards.
fn see(
    build: Build,
    held: &HashMap<String, Tensor>,
    change: Option<(&String, When, &Tensor)>,
) -> Result<Seen> {
    let mut original = None;
    let mut at = |now: When| -> Result<()> {
        let Some((name, when, change)) = change else {
            return Ok(());
        };
        if when == now {
            original = Some((&held[name], held[name].copy()?));
            overwrite(&held[name], change)?;
        }
        Ok(())
    };
    at(When::Before)?;
    let vb = VarBuilder::from_tensors(held.clone(), DType::F32, &Device::Cpu);
    let seen = match outcome(|| build(vb)) {
        Ok(mut forward) => {
            at(When::Built)?;
            let first = outcome(|| bits(&forward()?));
            at(When::Ran)?;
            [first, outcome(|| bits(&forward()?))]
        }
        Err(e) => [Err(e.clone()), Err(e)],
    };
    if let Some((tensor, values)) = original {
        overwrite(tensor, &values)?;
    }
    Ok(seen)
}

/// Writes `values` into the memory of `tensor`, where everything that shares it sees them.
fn overwrite(tensor: &Tensor, values: &Tensor) -> Result<()> {
    let (tensor, values) = (tensor.flatten_all()?, values.flatten_all()?);
    Ok(tensor.slice_set(&values, 0, 0)?)
}
