//! What the cache says to a request: the manifest, the engine's names and its terms, without the weights.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use candle_core::{DType, Device, Error, Shape, Tensor};

use crate::loader::{GetError, Names, Naming, Renaming, Terms};
use crate::manifest::{ElementType, Manifest, TensorEntry};

/// A request that the cache refuses.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Fault {
    /// As the model calls the tensor.
    pub(crate) name: String,
    /// As it is called in the checkpoint.
    pub(crate) stored_name: String,
    /// The shape that was asked for; `None`: whatever there is.
    pub(crate) shape: Option<Vec<usize>>,
    /// The dtype that was asked for.
    pub(crate) dtype: DType,
    /// It is not there.
    pub(crate) missing: bool,
    /// It has this shape instead.
    pub(crate) held: Option<Vec<u64>>,
    /// It is stored as this, and cannot be had, for this reason.
    pub(crate) mistyped: Option<(ElementType, String)>,
}

/// What has to be given for a [`Fault`] to go.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Item {
    pub(crate) name: String,
    /// Where it is there in another shape: this one.
    shape: Option<Vec<usize>>,
}

impl Fault {
    pub(crate) fn item(&self) -> Item {
        Item {
            name: self.name.clone(),
            shape: self.shape.clone().filter(|_| self.held.is_some()),
        }
    }

    /// The same for all that probably come of one line of the model's code.
    pub(crate) fn class(&self) -> String {
        let kind = if self.held.is_some() { "shape" } else { "" };
        format!("{} {kind}", without_numbers(&self.name))
    }

    /// The cache's answer.
    pub(crate) fn error(&self) -> Error {
        let path = self.name.clone();
        if self.missing {
            return Error::CannotFindTensor { path };
        }
        if let Some((_, why)) = &self.mistyped {
            return Error::Msg(why.clone());
        }
        let held = self.held.iter().flatten().map(|d| *d as usize);
        Error::UnexpectedShape {
            msg: format!("shape mismatch for {path}"),
            expected: Shape::from(self.shape.clone().unwrap_or_default()),
            got: Shape::from(held.collect::<Vec<_>>()),
        }
    }
}

pub(crate) struct Table {
    manifest: Arc<Manifest>,
    names: Arc<Names>,
    naming: Naming,
    terms: Terms,
    /// Whether candle converts from one dtype to another.
    casts: Mutex<HashMap<(DType, DType), Option<String>>>,
    /// A tensor for each name without its numbers.
    alike: OnceLock<HashMap<String, usize>>,
}

impl Table {
    pub(crate) fn new(
        manifest: Arc<Manifest>,
        names: Arc<Names>,
        naming: Naming,
        terms: Terms,
    ) -> Self {
        Self {
            manifest,
            names,
            naming,
            terms,
            casts: Mutex::default(),
            alike: OnceLock::new(),
        }
    }

    /// What the checkpoint calls `name`.
    fn stored<'a>(&self, name: &'a str, fit: &[Renaming]) -> Cow<'a, str> {
        let held = self.naming.held(name);
        match fit.iter().find_map(|renaming| renaming.apply(&held)) {
            Some(fitted) => Cow::Owned(fitted),
            None => held,
        }
    }

    /// Bytes of the largest tensor that is held, in the widest dtype.
    pub(crate) fn largest(&self) -> u64 {
        let count = |t: &TensorEntry| t.shape.iter().product::<u64>().saturating_mul(8);
        self.manifest.tensors.iter().map(count).max().unwrap_or(0)
    }

    pub(crate) fn find(&self, name: &str, fit: &[Renaming]) -> Option<usize> {
        self.manifest.find(&self.stored(name, fit))
    }

    /// The shape of what is held, or of a tensor that probably is like it.
    pub(crate) fn shape(&self, name: &str, fit: &[Renaming]) -> Option<Vec<usize>> {
        let stored = self.stored(name, fit);
        let index = self.manifest.find(&stored).or_else(|| {
            let alike = self.alike.get_or_init(|| {
                let tensors = self.manifest.tensors.iter().enumerate();
                tensors
                    .map(|(i, t)| (without_numbers(&t.name), i))
                    .collect()
            });
            alike.get(&without_numbers(&stored)).copied()
        })?;
        let shape = self.manifest.tensors[index].shape.iter();
        Some(shape.map(|d| *d as usize).collect())
    }

    /// What is wrong with a request, if anything.
    pub(crate) fn fault(
        &self,
        name: &str,
        shape: Option<&[usize]>,
        dtype: DType,
        fit: &[Renaming],
    ) -> Option<Fault> {
        let stored_name = self.stored(name, fit);
        let found = self.manifest.find(&stored_name);
        let entry = found.map(|index| &self.manifest.tensors[index]);
        let held = entry.filter(|entry| {
            let held = entry.shape.iter().map(|d| *d as usize);
            shape.is_some_and(|asked| !held.eq(asked.iter().copied()))
        });
        let mistyped = entry.and_then(|entry| Some((entry.element, self.mistyped(entry, dtype)?)));
        if entry.is_some() && held.is_none() && mistyped.is_none() {
            return None;
        }
        Some(Fault {
            name: name.to_string(),
            stored_name: stored_name.into_owned(),
            shape: shape.map(<[usize]>::to_vec),
            dtype,
            missing: entry.is_none(),
            held: held.map(|entry| entry.shape.clone()),
            mistyped,
        })
    }

    /// Why an entry cannot be had as a plain tensor of this dtype.
    fn mistyped(&self, entry: &TensorEntry, asked: DType) -> Option<String> {
        let held = match self.terms.converts(entry, asked) {
            Ok(_) => self.terms.plain_dtype(entry).ok()?,
            Err(e) => return Some(e.to_string()),
        };
        if held == asked {
            return None;
        }
        let mut casts = self.casts.lock().unwrap_or_else(PoisonError::into_inner);
        let refusal = casts.entry((held, asked)).or_insert_with(|| {
            let zero = Tensor::zeros(1, held, &Device::Cpu);
            let cast = zero.and_then(|zero| zero.to_dtype(asked));
            cast.err().map(|e| e.to_string())
        });
        let source = Error::Msg(refusal.clone()?);
        let cast = GetError::Cast {
            name: entry.name.clone(),
            stored: entry.element,
            asked,
            source,
        };
        Some(cast.to_string())
    }

    /// The prefixes that would find what is missing, where whole prefixes are off.
    pub(crate) fn fit(&self, faults: &[Fault], asked: &[String]) -> Vec<Renaming> {
        let missing: Vec<_> = faults.iter().filter(|fault| fault.missing).collect();
        let missing: Vec<_> = missing
            .iter()
            .map(|fault| (fault.stored_name.as_str(), fault.shape.as_deref()))
            .collect();
        let asked: Vec<Cow<'_, str>> = asked.iter().map(|name| self.naming.held(name)).collect();
        self.names.fit(&missing, &asked)
    }

    /// The names of `asked` that `fit` finds and that are not there otherwise.
    pub(crate) fn fitted(&self, fit: &[Renaming], asked: &[String]) -> Vec<String> {
        let fitted = asked
            .iter()
            .filter(|name| self.find(name, &[]).is_none() && self.find(name, fit).is_some());
        fitted.cloned().collect()
    }
}

/// A name with one sign for every number.
fn without_numbers(name: &str) -> String {
    let mut out = String::with_capacity(name.len());
    for c in name.chars() {
        let number = c.is_ascii_digit();
        if !number {
            out.push(c);
        } else if !out.ends_with('#') {
            out.push('#');
        }
    }
    out
}
