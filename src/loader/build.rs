//! Building a model, and one error that lists all that stands between the model and the weights: [`BuildError`].

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use candle_core::DType;
use candle_nn::VarBuilder;

use super::naming::{Naming, Renaming};
use super::{IpcCache, Shared};
use crate::manifest::ElementType;
use crate::meta_model::{self, Fault, Findings, Limits, Table};
use crate::protocol::EntryId;

/// Lines of one kind that are displayed.
const SHOWN: usize = 64;

/// Why a model was not built over the weights, or its variables not set to them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The weights are not what the model asks for.
    #[error(
        "the weights of {entry} are not what the model asks for:{unmet}{}",
        first(source)
    )]
    Unmet {
        /// The entry.
        entry: Box<EntryId>,
        /// Everything that is wrong.
        unmet: Box<Unmet>,
        /// candle's first error; `None` where no constructor ran.
        source: Option<Box<candle_core::Error>>,
    },
    /// The constructor failed, though nothing that it asks for was found to be wrong.
    #[error(
        "the model cannot be built, and beside its own error nothing was found wrong with {entry}: {source}{}",
        more(incomplete)
    )]
    Constructor {
        /// The entry.
        entry: Box<EntryId>,
        /// candle's error.
        source: Box<candle_core::Error>,
        /// Why something may have been overlooked.
        incomplete: Option<String>,
    },
    /// A variable could not be given its value.
    #[error(
        "variable `{name}` cannot be set to the weights of {entry}: {source}; {}",
        if *restored { "all variables are as they were" } else { "some variables have their new values: build the model again" }
    )]
    Set {
        /// The entry.
        entry: Box<EntryId>,
        /// The variable.
        name: String,
        /// What went wrong.
        source: Box<candle_core::Error>,
        /// Whether every variable has the value that it had.
        restored: bool,
    },
}

impl BuildError {
    /// Everything that is wrong with the weights; `None` where that is not the reason.
    pub fn unmet(&self) -> Option<&Unmet> {
        match self {
            Self::Unmet { unmet, .. } => Some(unmet),
            _ => None,
        }
    }
}

impl From<BuildError> for candle_core::Error {
    fn from(e: BuildError) -> Self {
        Self::wrap(e)
    }
}

fn first(source: &Option<Box<candle_core::Error>>) -> String {
    let source = source.as_ref();
    source.map_or_else(String::new, |e| format!("\ncandle's first error: {e}"))
}

fn more(incomplete: &Option<String>) -> String {
    let why = incomplete.as_ref();
    why.map_or_else(String::new, |why| format!(" ({why})"))
}

/// What a model asks for and the cache does not give. `Display` is one line for each, up to 64 of a kind.
///
/// Names that the model's code tried, and then did without, are not listed.
#[derive(Clone, Debug, Default)]
pub struct Unmet {
    /// Tensors that are not there, in the order in which they were asked for.
    pub missing: Vec<Missing>,
    /// Tensors of another shape.
    pub misshapen: Vec<Misshapen>,
    /// Tensors of a type that the request cannot be answered with.
    pub mistyped: Vec<Mistyped>,
    /// Prefixes that are off. The lists above hold what is wrong beside that.
    pub fit: Vec<Renaming>,
    /// The names that `fit` finds, in the order in which they were asked for.
    pub fitted: Vec<String>,
    /// Why there may be more.
    pub incomplete: Option<String>,
    /// Some of what is listed may be something that the model can do without: there was no time to find out.
    pub unsure: bool,
    /// The names that `fit` is about are the model's after these changes.
    naming: Naming,
}

/// A tensor that is not there.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Missing {
    /// What the model calls it.
    pub name: String,
    /// Under which name it was looked for.
    pub stored_name: String,
    /// The shape that was asked for; `None`: any.
    pub shape: Option<Vec<usize>>,
    /// Names that are there and like it, the nearest first; worked out for the first 64 tensors.
    pub nearest: Vec<String>,
    /// The embedding that stands for it in models with tied embeddings.
    pub tied: Option<String>,
}

/// A tensor of another shape.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Misshapen {
    /// What the model calls it.
    pub name: String,
    /// What the checkpoint calls it.
    pub stored_name: String,
    /// The shapes that were asked for, one of which would do.
    pub asked: Vec<Vec<usize>>,
    /// Its shape.
    pub held: Vec<u64>,
}

/// A tensor of a type that the request cannot be answered with.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Mistyped {
    /// What the model calls it.
    pub name: String,
    /// What the checkpoint calls it.
    pub stored_name: String,
    /// Its type.
    pub stored: ElementType,
    /// The dtype that was asked for.
    pub asked: DType,
    /// Why it cannot be had as that, and what to do.
    pub why: String,
}

impl Unmet {
    /// Whether nothing is wrong.
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty()
            && self.misshapen.is_empty()
            && self.mistyped.is_empty()
            && self.fit.is_empty()
    }

    pub(super) fn of(shared: &Shared, findings: Findings) -> Self {
        let mut unmet = Self {
            fit: findings.fit,
            fitted: findings.fitted,
            incomplete: findings.incomplete,
            unsure: findings.unsure,
            naming: shared.naming.clone(),
            ..Self::default()
        };
        for fault in findings.faults {
            let Fault {
                name,
                stored_name,
                shape,
                dtype,
                missing,
                held,
                mistyped,
            } = fault;
            if missing {
                let shown = unmet.missing.len() < SHOWN;
                let nearest = shown.then(|| shared.names.nearest(&stored_name));
                let nearest = nearest.into_iter().flatten();
                let tied = shown.then(|| shared.names.tied(&stored_name)).flatten();
                unmet.missing.push(Missing {
                    nearest: nearest.map(str::to_string).collect(),
                    tied: tied.map(str::to_string),
                    name,
                    stored_name,
                    shape,
                });
                continue;
            }
            if let Some((stored, why)) = mistyped {
                unmet.mistyped.push(Mistyped {
                    name: name.clone(),
                    stored_name: stored_name.clone(),
                    stored,
                    asked: dtype,
                    why,
                });
            }
            if let (Some(held), Some(shape)) = (held, shape) {
                let asked = findings.shapes.get(&name).cloned();
                unmet.misshapen.push(Misshapen {
                    name,
                    stored_name,
                    asked: asked.unwrap_or_else(|| vec![shape]),
                    held,
                });
            }
        }
        unmet
    }
}

impl fmt::Display for Unmet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        list(f, "not there", &self.missing)?;
        list(f, "of another shape", &self.misshapen)?;
        list(f, "of another type", &self.mistyped)?;
        if let Some(first) = self.fitted.first() {
            let held = self.naming.held(first);
            let found = self.fit.iter().find_map(|renaming| renaming.apply(&held));
            let count = self.fitted.len();
            let (names, begin) = if count == 1 {
                ("name", "begins")
            } else {
                ("names", "begin")
            };
            write!(f, "\n  {count} {names} {begin} otherwise in the checkpoint")?;
            if let Some(found) = found {
                write!(f, " (`{held}` is `{found}`)")?;
            }
            if self.naming.is_empty() {
                f.write_str(": ")?;
                for (i, renaming) in self.fit.iter().enumerate() {
                    let between = if i == 0 { "" } else { ", " };
                    write!(f, "{between}`{renaming}`")?;
                }
                f.write_str(" fits")?;
            } else {
                // A rename acts on the model's own names, before what is set.
                write!(f, ", after what is set ({}); change that:", self.naming)?;
                for (i, renaming) in self.fit.iter().enumerate() {
                    let between = if i == 0 { "" } else { "," };
                    let (from, to) = (&renaming.from, &renaming.to);
                    write!(
                        f,
                        "{between} what comes to begin with `{from}` begins with `{to}`"
                    )?;
                }
            }
        }
        if self.unsure {
            f.write_str("\n  the model may be able to do without some of these: there was no time to find out")?;
        }
        if let Some(why) = &self.incomplete {
            write!(f, "\n  the list may be incomplete: {why}")?;
        }
        Ok(())
    }
}

fn list<T: fmt::Display>(f: &mut fmt::Formatter<'_>, what: &str, items: &[T]) -> fmt::Result {
    match items.len() {
        0 => return Ok(()),
        1 => write!(f, "\n  1 tensor is {what}:")?,
        n => write!(f, "\n  {n} tensors are {what}:")?,
    }
    for item in items.iter().take(SHOWN) {
        write!(f, "\n    {item}")?;
    }
    if items.len() > SHOWN {
        write!(f, "\n    and {} more", items.len() - SHOWN)?;
    }
    Ok(())
}

/// The name, and the one in the checkpoint where that is another.
fn write_name(f: &mut fmt::Formatter<'_>, name: &str, stored: &str) -> fmt::Result {
    write!(f, "`{name}`")?;
    if name != stored {
        write!(f, " (as `{stored}`)")?;
    }
    Ok(())
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_name(f, &self.name, &self.stored_name)?;
        let mut between = ": nearest ";
        for name in &self.nearest {
            write!(f, "{between}`{name}`")?;
            between = ", ";
        }
        if let Some(embedding) = &self.tied {
            write!(
                f,
                "; a model with tied embeddings (`tie_word_embeddings` in its config) uses `{embedding}`"
            )?;
        }
        Ok(())
    }
}

impl fmt::Display for Misshapen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_name(f, &self.name, &self.stored_name)?;
        let mut between = ": asked for as ";
        for shape in &self.asked {
            write!(f, "{between}{shape:?}")?;
            between = " or ";
        }
        write!(f, ", held as {:?}", self.held)
    }
}

impl fmt::Display for Mistyped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.name != self.stored_name {
            write!(f, "`{}`: ", self.name)?;
        }
        f.write_str(&self.why)
    }
}

impl IpcCache {
    /// Builds a model over the weights: `build` is called with a [`VarBuilder`] as [`IpcCache::var_builder`] gives it.
    ///
    /// ```no_run
    /// use candle_core::{DType, Device};
    /// use candle_ipc_cache::{IpcCache, IpcConfig};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let cache = IpcCache::attach(&IpcConfig::new("my-model"), &Device::Cpu)?;
    /// let head = cache.build(DType::F32, |vb| {
    ///     candle_nn::linear(512, 2, vb.pp("classifier"))
    /// })?;
    /// # drop(head);
    /// # Ok(()) }
    /// ```
    ///
    /// Only if that fails, by an error or a panic, `build` is called again, some times, with builders on the CPU whose
    /// tensors have a shape and no values, to find out all that is wrong; what it then returns is dropped. Its side
    /// effects happen as often. These runs print no panics of this thread. They end at the next request after this process
    /// has grown by 2 GiB, or where a tensor that is not there is far larger than those that are; no further one begins
    /// after 5 s.
    ///
    /// # Errors
    /// [`BuildError::Unmet`] lists everything that is missing, misshapen and mistyped, and the prefixes that fit;
    /// [`BuildError::Constructor`] has the error of a constructor that fails for another reason. candle's first error
    /// is the source of both.
    ///
    /// # Panics
    /// When `build` panics and nothing that it asks for is found to be wrong. A process that was built with
    /// `panic = "abort"` ends at any panic of `build`.
    pub fn build<M>(
        &self,
        dtype: DType,
        build: impl Fn(VarBuilder<'static>) -> candle_core::Result<M>,
    ) -> Result<M, BuildError> {
        // Many constructors unwrap what they load, so that a panic is an error like any other.
        let ended = catch_unwind(AssertUnwindSafe(|| build(self.var_builder(dtype))));
        let (first, panic) = match ended {
            Ok(Ok(model)) => return Ok(model),
            Ok(Err(e)) => (e, None),
            Err(panic) => {
                let said = meta_model::said(&*panic);
                let error = candle_core::Error::Msg(format!("the constructor panicked: {said}"));
                (error, Some(panic))
            }
        };
        let first = Box::new(first);
        let shared = &*self.shared;
        let limits = Limits::default();
        let findings = meta_model::trace(shared.table(), dtype, limits, &|vb| build(vb).map(drop));
        let unmet = Unmet::of(shared, findings);
        let entry = Box::new(shared.report.entry.clone());
        if unmet.is_empty() {
            if let Some(panic) = panic {
                resume_unwind(panic);
            }
            return Err(BuildError::Constructor {
                entry,
                source: first,
                incomplete: unmet.incomplete,
            });
        }
        Err(BuildError::Unmet {
            entry,
            unmet: Box::new(unmet),
            source: Some(first),
        })
    }
}

impl Shared {
    /// What this cache says to requests.
    pub(super) fn table(&self) -> Table {
        Table::new(
            self.manifest.clone(),
            self.names.clone(),
            self.naming.clone(),
            self.terms,
        )
    }
}
