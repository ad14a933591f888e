//! What a load takes of a checkpoint: which tensors, and how they are cut among tensor-parallel ranks.
//! Decided from names and shapes alone: a plan that does not fit is refused before a tensor's byte is read.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;

use crate::checkpoint::SourceTensor;
use crate::pattern;
use crate::shard::{CutError, Part};
use crate::trace::{Trace, TraceError};

use super::stack;

/// Most rules, and most patterns to keep, of one plan.
const MAX_RULES: usize = 4096;
/// Largest file of rules, in bytes.
const MAX_TOML: u64 = 1 << 20;

/// What to take. The default is every tensor, whole.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Only what this trace asked for.
    only: Option<Arc<Named>>,
    /// Only what one of these patterns names; none: everything.
    keep: Vec<String>,
    plan: Option<Arc<ShardPlan>>,
}

/// How tensors are cut among ranks: a dimension for each, or all of it for every rank.
///
/// A file of rules is TOML:
///
/// ```toml
/// keep = ["model.layers.*"] # only these tensors; may be left out
/// [rules]
/// "*.q_proj" = 0            # each rank a slice along dimension 0
/// "*.o_proj" = 1
/// "*norm*" = "replicate"    # every rank all of it, as what no rule names
/// ```
///
/// Patterns are those of a [`Recipe`](crate::quantize::Recipe). A whole name goes before any pattern.
#[derive(Clone, Debug)]
pub struct ShardPlan {
    shown: String,
    keep: Vec<String>,
    how: How,
}

#[derive(Clone, Debug)]
enum How {
    /// Sorted by pattern.
    Rules(Vec<Rule>),
    Trace(Arc<Named>),
}

#[derive(Clone, Debug)]
struct Rule {
    pattern: String,
    /// The dimension; `None`: every rank has all of it.
    dim: Option<u32>,
}

/// What a trace asked for, by name.
#[derive(Clone, Debug)]
struct Named {
    shown: String,
    tensors: BTreeMap<String, Wish>,
}

#[derive(Clone, Debug, Default)]
struct Wish {
    /// Shapes that were asked for without a shard.
    shapes: Vec<Vec<u64>>,
    /// Whether it was asked for without a shard.
    whole: bool,
    dim: Option<u32>,
}

/// One tensor that is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pick {
    /// Index among the checkpoint's tensors.
    pub index: usize,
    /// The dimension along which it is cut; `None`: it is taken whole.
    pub dim: Option<u32>,
}

/// Why a selection cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SelectError {
    /// A file that cannot be read.
    #[error("the shard plan {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// A file that is no such TOML.
    #[error(
        "the shard plan {}: {what}; write, under `[rules]`, lines like `\"*.q_proj\" = 0` and `\"*norm*\" = \"replicate\"`",
        path.display()
    )]
    Toml {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// A file that is no trace.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A trace that cuts one tensor in two ways.
    #[error(
        "the trace {shown} asks for slices of `{tensor}` along dimensions {first} and {second}: a load can cut it along one; \
         give a plan of rules that says which"
    )]
    TwoDims {
        /// The trace.
        shown: String,
        /// The tensor.
        tensor: String,
        /// One dimension.
        first: u32,
        /// The other.
        second: u32,
    },
    /// A pattern without a tensor.
    #[error(
        "{what} `{pattern}` names no tensor of this checkpoint{}: see the names with `candle-cache plan`",
        .nearest.as_ref().map(|n| format!(" (nearest: `{n}`)")).unwrap_or_default()
    )]
    NoTensor {
        /// What the pattern is.
        what: &'static str,
        /// The pattern.
        pattern: String,
        /// The name most like it.
        nearest: Option<String>,
    },
    /// Two rules for one tensor.
    #[error(
        "the rules `{first}` and `{second}` both name `{tensor}`: make one pattern narrower, or give the tensor's whole \
         name"
    )]
    Conflict {
        /// One rule.
        first: String,
        /// The other.
        second: String,
        /// A tensor that both name.
        tensor: String,
    },
    /// A cut between stacked experts.
    #[error(
        "the trace {shown} asks for slices of the stacked experts `{tensor}` along dimension 0, which are other experts for \
         each rank: load those with --keep and --ep, or give a plan of rules that cuts each expert"
    )]
    Experts {
        /// The trace.
        shown: String,
        /// The stack.
        tensor: String,
    },
    /// Names that the checkpoint does not hold.
    #[error(
        "the trace {shown} asks for {} of {asked} tensors that this checkpoint does not hold, so it is of another model or \
         of other names: {}",
        names.len(),
        names.iter().map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ")
    )]
    Missing {
        /// The trace.
        shown: String,
        /// How many tensors it asks for.
        asked: usize,
        /// Those that are missing, all of them.
        names: Vec<String>,
    },
    /// Shapes that the checkpoint does not hold.
    #[error(
        "the trace {shown} asks for {} tensors in shapes that this checkpoint does not hold, so it is of another model: {}",
        tensors.len(),
        tensors.join(", ")
    )]
    Shapes {
        /// The trace.
        shown: String,
        /// Each of them, with both shapes.
        tensors: Vec<String>,
    },
    /// A tensor that cannot be cut as the plan says.
    #[error("{why}: tensor `{tensor}` cannot be cut among {size} ranks: {source}")]
    Cut {
        /// What asks for it.
        why: String,
        /// The tensor.
        tensor: String,
        /// How many ranks.
        size: u16,
        /// What stands against it.
        source: CutError,
    },
    /// Ranks without a plan.
    #[error(
        "a load for rank {part} needs a shard plan, which says along which dimension each tensor is cut: give --plan"
    )]
    NoPlan {
        /// The rank.
        part: Part,
    },
    /// A plan without ranks.
    #[error("the shard plan {shown} cuts tensors among ranks, and there is one rank: give --tp")]
    NoRanks {
        /// The plan.
        shown: String,
    },
    /// Nothing is left.
    #[error(
        "no tensor is left to load: what --keep names and what --only asks for have none in common"
    )]
    Nothing,
}

impl Selection {
    /// Takes only what `trace` asked for. `shown` is what errors call it.
    ///
    /// # Errors
    /// When it asks for two cuts of one tensor.
    pub fn only(mut self, trace: &Trace, shown: impl Into<String>) -> Result<Self, SelectError> {
        self.only = Some(Arc::new(Named::of(trace, shown.into())?));
        Ok(self)
    }

    /// Takes only what one of `patterns` names, besides those that were given before; none: everything.
    pub fn keep(mut self, patterns: impl IntoIterator<Item = String>) -> Self {
        self.keep.extend(patterns);
        self
    }

    /// Cuts tensors among ranks.
    pub fn plan(mut self, plan: ShardPlan) -> Self {
        self.plan = Some(Arc::new(plan));
        self
    }

    /// Whether something says which tensors are taken.
    pub fn filters(&self) -> bool {
        let planned = self.plan.as_ref().is_some_and(|plan| !plan.keep.is_empty());
        self.only.is_some() || !self.keep.is_empty() || planned
    }

    /// What is taken of `tensors` for rank `tp`, in their order. With `stacked`, a trace may name experts by their stack.
    ///
    /// # Errors
    /// Names what does not fit, and the tensor.
    pub fn resolve(
        &self,
        tensors: &[SourceTensor],
        tp: Part,
        stacked: bool,
    ) -> Result<Vec<Pick>, SelectError> {
        if let Some(only) = &self.only {
            only.check(tensors, stacked)?;
        }
        let planned = self.plan.iter().flat_map(|plan| &plan.keep);
        let keep: Vec<&String> = self.keep.iter().chain(planned).collect();
        for pattern in &keep {
            named("the pattern to keep", pattern, tensors)?;
        }
        let dims = match &self.plan {
            Some(plan) => plan.dims(tensors, stacked)?,
            None if !tp.is_whole() => return Err(SelectError::NoPlan { part: tp }),
            None => vec![None; tensors.len()],
        };
        if let Some(plan) = self.plan.as_ref().filter(|_| tp.is_whole())
            && dims.iter().any(Option::is_some)
        {
            return Err(SelectError::NoRanks {
                shown: plan.shown.clone(),
            });
        }
        let picks: Vec<Pick> = dims
            .into_iter()
            .enumerate()
            .filter(|(index, _)| {
                let name = &tensors[*index].name;
                let asked = |only: &Arc<Named>| {
                    only.tensors.contains_key(name) || only.by_stack(name, stacked).is_some()
                };
                self.only.as_ref().is_none_or(asked)
                    && (keep.is_empty() || keep.iter().any(|p| pattern::names(p, name)))
            })
            .map(|(index, dim)| Pick { index, dim })
            .collect();
        if picks.is_empty() && !tensors.is_empty() {
            return Err(SelectError::Nothing);
        }
        Ok(picks)
    }

    /// What asks for the cut of this tensor.
    pub(super) fn why(&self, tensor: &str) -> String {
        match self.plan.as_deref() {
            Some(ShardPlan {
                how: How::Rules(rules),
                ..
            }) => {
                let mut of = rules.iter().filter(|r| pattern::names(&r.pattern, tensor));
                let exact = of.clone().find(|r| pattern::is_exact(&r.pattern));
                let rule = exact.or_else(|| of.next());
                rule.map_or_else(String::new, |rule| format!("the rule `{rule}`"))
            }
            Some(plan) => format!("the trace {}", plan.shown),
            None => String::new(),
        }
    }
}

impl ShardPlan {
    /// Reads a file of rules (`.toml`), or a trace, whose shards say along which dimension each tensor is cut.
    ///
    /// # Errors
    /// Names the file, and what is wrong with it.
    pub fn read(path: &Path) -> Result<Self, SelectError> {
        if path.extension().is_some_and(|e| e == "toml") {
            return Self::rules(path);
        }
        Self::of_trace(&Trace::read(path)?, path.display().to_string())
    }

    /// The cuts that a trace asks for. `shown` is what errors call it.
    ///
    /// # Errors
    /// When it asks for two cuts of one tensor.
    pub fn of_trace(trace: &Trace, shown: impl Into<String>) -> Result<Self, SelectError> {
        let shown = shown.into();
        Ok(Self {
            how: How::Trace(Arc::new(Named::of(trace, shown.clone())?)),
            keep: Vec::new(),
            shown,
        })
    }

    fn rules(path: &Path) -> Result<Self, SelectError> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Written {
            #[serde(default)]
            keep: Vec<String>,
            #[serde(default)]
            rules: BTreeMap<String, toml::Value>,
        }
        let file = |source| SelectError::File {
            path: path.into(),
            source,
        };
        let wrong = |what: String| SelectError::Toml {
            path: path.into(),
            what,
        };
        let meta = std::fs::metadata(path).map_err(file)?;
        if !meta.is_file() || meta.len() > MAX_TOML {
            let what = format!("it is no regular file of at most {MAX_TOML} bytes");
            return Err(file(std::io::Error::other(what)));
        }
        let text = std::fs::read_to_string(path).map_err(file)?;
        let written: Written = toml::from_str(&text).map_err(|e| wrong(e.message().to_string()))?;
        let count = written.rules.len().max(written.keep.len());
        if count > MAX_RULES {
            return Err(wrong(format!(
                "{count} rules, the limit is {MAX_RULES}: use patterns with `*`"
            )));
        }
        let rule = |(pattern, value): (String, toml::Value)| {
            let dim = match &value {
                toml::Value::Integer(dim) => u32::try_from(*dim).ok().map(Some),
                toml::Value::String(word) if word == "replicate" => Some(None),
                _ => None,
            };
            match dim {
                Some(dim) => Ok(Rule { pattern, dim }),
                None => {
                    let value = match value {
                        toml::Value::Integer(number) => number.to_string(),
                        toml::Value::String(word) => format!("\"{word}\""),
                        other => format!("a {}", other.type_str()),
                    };
                    Err(wrong(format!(
                        "the rule `{pattern}` = {value} is neither a dimension nor \"replicate\""
                    )))
                }
            }
        };
        Ok(Self {
            shown: path.display().to_string(),
            keep: written.keep,
            how: How::Rules(
                written
                    .rules
                    .into_iter()
                    .map(rule)
                    .collect::<Result<_, _>>()?,
            ),
        })
    }

    /// The dimension along which each of `tensors` is cut.
    fn dims(
        &self,
        tensors: &[SourceTensor],
        stacked: bool,
    ) -> Result<Vec<Option<u32>>, SelectError> {
        match &self.how {
            How::Trace(trace) => {
                trace.check(tensors, stacked)?;
                tensors
                    .iter()
                    .map(|t| trace.dim(&t.name, stacked))
                    .collect()
            }
            How::Rules(rules) => {
                let names: HashSet<&str> = tensors.iter().map(|t| t.name.as_str()).collect();
                for rule in rules {
                    // A whole name is looked up; a pattern is compared with every name.
                    let weight = || format!("{}.weight", rule.pattern);
                    let known =
                        names.contains(rule.pattern.as_str()) || names.contains(weight().as_str());
                    if !known {
                        named("the rule", &rule.pattern, tensors)?;
                    }
                }
                let (exact, patterns): (Vec<&Rule>, Vec<&Rule>) =
                    rules.iter().partition(|r| pattern::is_exact(&r.pattern));
                let exact: HashMap<&str, &Rule> =
                    exact.into_iter().map(|r| (r.pattern.as_str(), r)).collect();
                tensors
                    .iter()
                    .map(|t| by_rules(&exact, &patterns, &t.name))
                    .collect()
            }
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.dim {
            Some(dim) => write!(f, "{}={dim}", self.pattern),
            None => write!(f, "{}=replicate", self.pattern),
        }
    }
}

fn by_rules(
    exact: &HashMap<&str, &Rule>,
    patterns: &[&Rule],
    tensor: &str,
) -> Result<Option<u32>, SelectError> {
    let short = tensor.strip_suffix(".weight").and_then(|s| exact.get(s));
    let whole: Vec<&Rule> = exact
        .get(tensor)
        .into_iter()
        .chain(short)
        .copied()
        .collect();
    let named = || {
        let fitting = patterns.iter().copied();
        fitting
            .filter(|r| pattern::names(&r.pattern, tensor))
            .collect()
    };
    let rules: Vec<&Rule> = if whole.is_empty() { named() } else { whole };
    let Some(first) = rules.first() else {
        return Ok(None);
    };
    match rules.iter().find(|r| r.dim != first.dim) {
        Some(second) => Err(SelectError::Conflict {
            first: first.to_string(),
            second: second.to_string(),
            tensor: tensor.to_string(),
        }),
        None => Ok(first.dim),
    }
}

fn named(what: &'static str, pattern: &str, tensors: &[SourceTensor]) -> Result<(), SelectError> {
    let names = || tensors.iter().map(|t| t.name.as_str());
    if names().any(|name| pattern::names(pattern, name)) {
        return Ok(());
    }
    Err(SelectError::NoTensor {
        what,
        pattern: pattern.into(),
        nearest: pattern::nearest(pattern, names()),
    })
}

impl Named {
    fn of(trace: &Trace, shown: String) -> Result<Self, SelectError> {
        let mut tensors: BTreeMap<String, Wish> = BTreeMap::new();
        for asked in &trace.tensors {
            let wish = tensors.entry(asked.name.clone()).or_default();
            match asked.shard.filter(|shard| shard.size > 1) {
                None => {
                    wish.whole = true;
                    wish.shapes.extend(asked.shape.clone());
                }
                Some(shard) => {
                    if let Some(first) = wish.dim.filter(|dim| *dim != shard.dim) {
                        return Err(SelectError::TwoDims {
                            shown,
                            tensor: asked.name.clone(),
                            first,
                            second: shard.dim,
                        });
                    }
                    wish.dim = Some(shard.dim);
                }
            }
        }
        // What is asked for whole as well (an embedding that is the output head, too) is kept whole: that serves both.
        for wish in tensors.values_mut().filter(|wish| wish.whole) {
            wish.dim = None;
        }
        Ok(Self { shown, tensors })
    }

    /// What was asked for the stack that `tensor` is an expert of.
    fn by_stack(&self, tensor: &str, stacked: bool) -> Option<(&String, &Wish)> {
        let (stack, _) = stack::place(tensor).filter(|_| stacked)?;
        self.tensors.get_key_value(&stack)
    }

    /// The dimension along which `tensor` is cut.
    fn dim(&self, tensor: &str, stacked: bool) -> Result<Option<u32>, SelectError> {
        if let Some(wish) = self.tensors.get(tensor) {
            return Ok(wish.dim);
        }
        let Some((stack, wish)) = self.by_stack(tensor, stacked) else {
            return Ok(None);
        };
        match wish.dim {
            None => Ok(None),
            Some(0) => Err(SelectError::Experts {
                shown: self.shown.clone(),
                tensor: stack.clone(),
            }),
            Some(dim) => Ok(Some(dim - 1)),
        }
    }

    /// Whether the checkpoint is one that the trace can have been recorded on.
    fn check(&self, tensors: &[SourceTensor], stacked: bool) -> Result<(), SelectError> {
        let held: HashMap<&str, &SourceTensor> =
            tensors.iter().map(|t| (t.name.as_str(), t)).collect();
        let stacks: HashSet<String> = tensors
            .iter()
            .filter(|_| stacked)
            .filter_map(|t| Some(stack::place(&t.name)?.0))
            .collect();
        let missing: Vec<String> = self
            .tensors
            .keys()
            .filter(|name| !held.contains_key(name.as_str()) && !stacks.contains(*name))
            .cloned()
            .collect();
        if !missing.is_empty() {
            return Err(SelectError::Missing {
                shown: self.shown.clone(),
                asked: self.tensors.len(),
                names: missing,
            });
        }
        let other = |(name, wish): (&String, &Wish)| {
            let held = held.get(name.as_str())?;
            // A model may have tried several: one of them is right.
            let first = wish.shapes.first()?;
            (!wish.shapes.contains(&held.shape))
                .then(|| format!("`{name}` as {first:?}, held as {:?}", held.shape))
        };
        let tensors: Vec<String> = self.tensors.iter().filter_map(other).collect();
        if !tensors.is_empty() {
            return Err(SelectError::Shapes {
                shown: self.shown.clone(),
                tensors,
            });
        }
        Ok(())
    }
}
