//! What a recipe makes of a checkpoint, tensor by tensor, and why. Rules that name nothing, contradict each other or
//! cannot be followed are errors here, before a byte of a tensor is read.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use super::recipe::{Choice, Rule};
use super::{Quantize, Target, names};
use crate::checkpoint::SourceTensor;
use crate::manifest::ElementType;
use crate::pattern;
use ElementType::{
    BF16, F4, F6E2M3, F6E3M2, F8E4M3, F8E5M2, F16, F32, F64, Q2K, Q3K, Q4K, Q5K, Q6K,
};

/// What one tensor becomes.
#[derive(Clone, Debug, PartialEq)]
pub struct Assigned {
    /// The type to quantize to; `None`: as without a recipe.
    pub target: Option<ElementType>,
    /// Why.
    pub why: Why,
    /// How much each column matters, where the type can use it: one value a column, or one a column and expert.
    pub importance: Option<Arc<[f32]>>,
}

/// Why a tensor becomes what it becomes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Why {
    /// This rule says so.
    Rule(String),
    /// The default says so.
    Default,
    /// An embedding or an output head: a better type than the default.
    Ends,
    /// No rule, and no default.
    Unnamed,
    /// A vector or a scalar.
    Vector,
    /// A norm.
    Norm,
    /// A table of positions, segments or distances.
    Position,
    /// The matrix that chooses experts.
    Router,
    /// A convolution's kernel.
    Convolution,
    /// No floats.
    NotFloat,
    /// Low precision with scales beside it, or such scales.
    Scaled,
    /// GGML blocks are passed through.
    Blocks,
    /// Its rows are no whole number of blocks.
    Rows {
        /// Elements of a row.
        row: u64,
        /// Elements of a block.
        block: u64,
    },
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rule(rule) => write!(f, "rule {rule}"),
            Self::Default => f.write_str("default"),
            Self::Ends => f.write_str("embedding or output head"),
            Self::Unnamed => f.write_str("no rule"),
            Self::Vector => f.write_str("a vector"),
            Self::Norm => f.write_str("a norm"),
            Self::Position => f.write_str("a table of positions"),
            Self::Router => f.write_str("chooses experts"),
            Self::Convolution => f.write_str("a convolution"),
            Self::NotFloat => f.write_str("no floats"),
            Self::Scaled => f.write_str("low precision with scales"),
            Self::Blocks => f.write_str("GGML blocks already"),
            Self::Rows { row, block } => {
                write!(f, "rows of {row} are no whole blocks of {block}")
            }
        }
    }
}

/// Why a recipe cannot be followed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AssignError {
    /// A rule without a tensor.
    #[error(
        "the rule `{rule}` names no tensor of this checkpoint{}: see the names with `candle-cache plan`",
        .nearest.as_deref().unwrap_or_default()
    )]
    NoTensor {
        /// The rule.
        rule: String,
        /// A word on the name that may have been meant.
        nearest: Option<String>,
    },
    /// A rule that names only what cannot be quantized.
    #[error(
        "the rule `{rule}` names only tensors that it leaves as they are, for instance `{tensor}` ({why}): give the \
         whole name of one that you mean"
    )]
    NoEffect {
        /// The rule.
        rule: String,
        /// The first of its tensors.
        tensor: String,
        /// Why that is left.
        why: Why,
    },
    /// Two rules for one tensor.
    #[error(
        "the rules `{first}` and `{second}` both name `{tensor}` and ask for different types: make one pattern narrower, \
         or give the tensor's whole name"
    )]
    Conflict {
        /// One rule.
        first: String,
        /// The other.
        second: String,
        /// A tensor that both name.
        tensor: String,
    },
    /// Rows that are no whole number of blocks.
    #[error(
        "the rule `{rule}`: a row of `{tensor}` has {row} elements, which are no whole blocks of {block}; name a fallback \
         in the rule, for instance `{rule}/q8_0` (blocks of 32) or `{rule}/stored`"
    )]
    Rows {
        /// The rule.
        rule: String,
        /// The tensor.
        tensor: String,
        /// Elements of its last dimension.
        row: u64,
        /// Elements of a block.
        block: u64,
    },
    /// A type that is not quantized.
    #[error(
        "the rule `{rule}`: `{tensor}` holds {element}, which is not quantized: leave it out, or say `stored`"
    )]
    NotFloat {
        /// The rule.
        rule: String,
        /// The tensor.
        tensor: String,
        /// Its type.
        element: ElementType,
    },
    /// Low precision that means nothing without its scales.
    #[error(
        "the rule `{rule}`: `{tensor}` holds {element} with scales beside it (`{scale}`), and would be quantized without \
         them: say `stored` for it, or convert the checkpoint to BF16 first"
    )]
    Scaled {
        /// The rule.
        rule: String,
        /// The tensor.
        tensor: String,
        /// Its type.
        element: ElementType,
        /// Its scales.
        scale: String,
    },
    /// GGML blocks.
    #[error(
        "`{tensor}` is quantized already ({element}): load the file as it is, without --quantize; --requantize quantizes \
         it again, and loses precision twice"
    )]
    Requantize {
        /// The first such tensor.
        tensor: String,
        /// Its type.
        element: ElementType,
    },
    /// An importance matrix of other sizes.
    #[error(
        "the importance matrix {path} has {found} values for `{tensor}`, whose rows have {wanted} elements: it was made \
         from another model"
    )]
    ImatrixSize {
        /// The file.
        path: String,
        /// The tensor.
        tensor: String,
        /// Values in the file.
        found: usize,
        /// Elements of the tensor's last dimension.
        wanted: u64,
    },
    /// An importance matrix of other names.
    #[error(
        "the importance matrix {path} has no entry for any of the {tensors} tensors that could use one: it was made from \
         another model, or its names are spelled otherwise"
    )]
    ImatrixNames {
        /// The file.
        path: String,
        /// Tensors that could use one.
        tensors: usize,
    },
    /// An importance matrix that nothing uses.
    #[error(
        "the importance matrix {path} would not be used: no tensor becomes q2k, q3k, q4k, q5k or q6k, the types that use \
         one; leave --imatrix out, or choose one of them"
    )]
    ImatrixUnused {
        /// The file.
        path: String,
    },
}

/// What each tensor becomes, in the order of `tensors`.
///
/// # Errors
/// Names the rule that cannot be followed, and a tensor.
pub fn assign(tensors: &[SourceTensor], how: &Quantize) -> Result<Vec<Assigned>, AssignError> {
    let assigner = Assigner {
        how,
        scales: scales(tensors),
        packed: packed(tensors),
    };
    let mut outcomes: Vec<Vec<(&SourceTensor, Why)>> = vec![Vec::new(); how.recipe.rules.len()];
    let mut assigned = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let (target, why) = match rule_for(&how.recipe.rules, tensor)? {
            Some(index) => {
                let (target, why) = assigner.by_rule(&how.recipe.rules[index], tensor)?;
                outcomes[index].push((tensor, why.clone()));
                (target, why)
            }
            None => assigner.by_default(tensor)?,
        };
        assigned.push(Assigned {
            target,
            why,
            importance: None,
        });
    }
    for (rule, outcomes) in how.recipe.rules.iter().zip(outcomes) {
        let followed = |why: &Why| matches!(why, Why::Rule(_));
        if outcomes.iter().any(|(_, why)| followed(why)) {
            continue;
        }
        // A tensor that a whole name took away from a pattern is named by the pattern all the same.
        if tensors.iter().all(|t| !rule.names(&t.name)) {
            return Err(AssignError::NoTensor {
                rule: rule.to_string(),
                nearest: meant(&rule.pattern, tensors),
            });
        }
        if let Some((tensor, why)) = outcomes.into_iter().next() {
            return Err(AssignError::NoEffect {
                rule: rule.to_string(),
                tensor: tensor.name.clone(),
                why,
            });
        }
    }
    importance(tensors, how, &mut assigned)?;
    Ok(assigned)
}

/// The rule that names a tensor: its whole name before any pattern.
fn rule_for(rules: &[Rule], tensor: &SourceTensor) -> Result<Option<usize>, AssignError> {
    let named = |exact: bool| {
        rules
            .iter()
            .enumerate()
            .filter(move |(_, r)| r.is_exact() == exact && r.names(&tensor.name))
    };
    for exact in [true, false] {
        let mut found: Option<usize> = None;
        for (index, rule) in named(exact) {
            match found {
                Some(first) if rules[first].choice != rule.choice => {
                    return Err(AssignError::Conflict {
                        first: rules[first].to_string(),
                        second: rule.to_string(),
                        tensor: tensor.name.clone(),
                    });
                }
                _ => found = Some(index),
            }
        }
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

struct Assigner<'a> {
    how: &'a Quantize,
    /// Scales, by what they have in common with what they scale.
    scales: HashMap<&'a str, &'a str>,
    /// What neighbours have in common of which one is packed integers.
    packed: HashSet<&'a str>,
}

type Outcome = (Option<ElementType>, Why);

impl Assigner<'_> {
    fn by_rule(&self, rule: &Rule, tensor: &SourceTensor) -> Result<Outcome, AssignError> {
        let followed = || Why::Rule(rule.to_string());
        if rule.choice.first() == Some(&Target::Stored) {
            return Ok((None, followed()));
        }
        // A pattern means the matrices among what it names; a whole name means what it says.
        let exact = rule.is_exact();
        if !exact && tensor.shape.len() < 2 {
            return Ok((None, Why::Vector));
        }
        if let Some(scale) = self.scale_of(tensor) {
            return Err(AssignError::Scaled {
                rule: rule.to_string(),
                tensor: tensor.name.clone(),
                element: tensor.element,
                scale: scale.to_string(),
            });
        }
        if self.belongs_to_packed(tensor) && !exact {
            return Ok((None, Why::Scaled));
        }
        if !self.quantizable(tensor)? {
            if !exact {
                return Ok((None, Why::NotFloat));
            }
            return Err(AssignError::NotFloat {
                rule: rule.to_string(),
                tensor: tensor.name.clone(),
                element: tensor.element,
            });
        }
        match fitting(&rule.choice, tensor) {
            Ok(target) => Ok((target, followed())),
            Err((row, block)) => Err(AssignError::Rows {
                rule: rule.to_string(),
                tensor: tensor.name.clone(),
                row,
                block,
            }),
        }
    }

    fn by_default(&self, tensor: &SourceTensor) -> Result<Outcome, AssignError> {
        let Some(default) = &self.how.recipe.default else {
            return Ok((None, Why::Unnamed));
        };
        if default.first() == Some(&Target::Stored) {
            return Ok((None, Why::Default));
        }
        let name = tensor.name.as_str();
        let left = if self.scale_of(tensor).is_some() || self.belongs_to_packed(tensor) {
            Some(Why::Scaled)
        } else if !self.quantizable(tensor)? {
            Some(Why::NotFloat)
        } else if tensor.shape.len() < 2 || names::is_bias(name) {
            Some(Why::Vector)
        } else if names::is_norm(name) {
            Some(Why::Norm)
        } else if names::is_position(name) {
            Some(Why::Position)
        } else if names::is_router(name) {
            Some(Why::Router)
        } else if names::is_convolution(name) || tensor.shape.len() > 3 {
            Some(Why::Convolution)
        } else {
            None
        };
        if let Some(why) = left {
            return Ok((None, why));
        }
        let ends = names::is_embedding(name) || names::is_head(name);
        let choice: Choice = if ends {
            better(default[0]).chain(default.iter().copied()).collect()
        } else {
            default.clone()
        };
        Ok(match fitting(&choice, tensor) {
            Ok(target) if ends => (target, Why::Ends),
            Ok(target) => (target, Why::Default),
            Err((row, block)) => (None, Why::Rows { row, block }),
        })
    }

    /// Whether candle makes floats of the tensor, so that it can be quantized.
    fn quantizable(&self, tensor: &SourceTensor) -> Result<bool, AssignError> {
        if tensor.element.is_quantized() && !self.how.requantize {
            return Err(AssignError::Requantize {
                tensor: tensor.name.clone(),
                element: tensor.element,
            });
        }
        Ok(tensor.element.is_quantized()
            || matches!(tensor.element, F64 | F32 | F16 | BF16 | F8E4M3))
    }

    /// The scales beside a low-precision tensor.
    fn scale_of(&self, tensor: &SourceTensor) -> Option<&str> {
        if !matches!(tensor.element, F8E4M3 | F8E5M2 | F6E2M3 | F6E3M2 | F4) {
            return None;
        }
        self.scales.get(names::parent(&tensor.name)).copied()
    }

    /// Scales, and what lies beside packed integers: numbers that mean nothing by themselves.
    fn belongs_to_packed(&self, tensor: &SourceTensor) -> bool {
        names::is_scale(&tensor.name) || self.packed.contains(names::parent(&tensor.name))
    }
}

fn scales(tensors: &[SourceTensor]) -> HashMap<&str, &str> {
    let mut scales = HashMap::new();
    for tensor in tensors.iter().filter(|t| names::is_scale(&t.name)) {
        // Sorted by name: the first of several is the one that is told.
        let base = names::parent(&tensor.name);
        scales.entry(base).or_insert(tensor.name.as_str());
    }
    scales
}

/// Weights are packed into integers of up to 32 bits; indices and masks of those types are no matrices, or not beside
/// weights.
fn packed(tensors: &[SourceTensor]) -> HashSet<&str> {
    use ElementType::{I8, I16, I32, U8, U16, U32};
    let integers = |t: &&SourceTensor| {
        matches!(t.element, U8 | I8 | U16 | I16 | U32 | I32) && t.shape.len() >= 2
    };
    let parents = tensors.iter().filter(integers);
    parents.map(|t| names::parent(&t.name)).collect()
}

/// A better type for a model's two ends, as GGUF files have: best first.
fn better(default: Target) -> impl Iterator<Item = Target> {
    use ElementType::{Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
    let types: &[ElementType] = match default {
        Target::As(Q2K | Q3K | Q4K | Q5K | Q4_0 | Q4_1 | Q5_0 | Q5_1) => &[Q6K, Q8_0],
        Target::As(Q6K) => &[Q8_0],
        _ => &[],
    };
    types.iter().map(|t| Target::As(*t))
}

/// The first of the choice whose blocks divide the tensor's rows; else what stood against the first.
fn fitting(choice: &[Target], tensor: &SourceTensor) -> Result<Option<ElementType>, (u64, u64)> {
    let row = tensor.shape.last().copied();
    let mut against = None;
    for target in choice {
        let Target::As(element) = target else {
            return Ok(None);
        };
        let block = element.block_elements();
        // A scalar has no row; an unquantized type has blocks of one.
        if block == 1 || row.is_some_and(|row| row.is_multiple_of(block)) {
            return Ok(Some(*element));
        }
        against.get_or_insert((row.unwrap_or(1), block));
    }
    Err(against.unwrap_or((row.unwrap_or(1), 1)))
}

fn importance(
    tensors: &[SourceTensor],
    how: &Quantize,
    assigned: &mut [Assigned],
) -> Result<(), AssignError> {
    let Some(imatrix) = &how.imatrix else {
        return Ok(());
    };
    let path = || imatrix.path().to_string();
    let (mut could, mut did) = (0, 0);
    for (tensor, assigned) in tensors.iter().zip(assigned) {
        let uses = matches!(assigned.target, Some(Q2K | Q3K | Q4K | Q5K | Q6K));
        if !uses || tensor.bytes == 0 {
            continue;
        }
        could += 1;
        let Some(columns) = imatrix.of(&tensor.name) else {
            continue;
        };
        let row = tensor.shape.last().copied().unwrap_or(1);
        let experts = match tensor.shape.as_slice() {
            [experts, _, _] => *experts,
            _ => 1,
        };
        let found = columns.len() as u64;
        if found != row && Some(found) != row.checked_mul(experts) {
            return Err(AssignError::ImatrixSize {
                path: path(),
                tensor: tensor.name.clone(),
                found: columns.len(),
                wanted: row,
            });
        }
        did += 1;
        assigned.importance = Some(sound(columns, row as usize));
    }
    match (could, did) {
        (0, _) => Err(AssignError::ImatrixUnused { path: path() }),
        (tensors, 0) => Err(AssignError::ImatrixNames {
            path: path(),
            tensors,
        }),
        _ => Ok(()),
    }
}

/// A word on what a pattern that names nothing may have meant.
fn meant(pattern: &str, tensors: &[SourceTensor]) -> Option<String> {
    if let Some(name) = pattern::nearest(pattern, tensors.iter().map(|t| t.name.as_str())) {
        return Some(format!(" (nearest: `{name}`)"));
    }
    let tied = tensors.iter().find(|t| names::is_embedding(&t.name))?;
    let head = names::is_head(&pattern.replace(['*', '?'], ""));
    head.then(|| {
        format!(
            " (its output head is the embedding, `{}`: name that)",
            tied.name
        )
    })
}

/// Importances as candle's sums can take them. Where all columns of a row matter not at all (an expert that no text
/// reached), all matter equally; where some do not, or the values span more than sums in F32 can, each matters at least
/// a millionth of the most important. Others stay what they are.
fn sound(columns: &Arc<[f32]>, row: usize) -> Arc<[f32]> {
    let fine = |v: &f32| (1e-15..=1e15).contains(v);
    if columns.iter().all(fine) {
        return columns.clone();
    }
    let mut out = Vec::with_capacity(columns.len());
    for row in columns.chunks(row.max(1)) {
        let most = row.iter().copied().fold(0f32, f32::max);
        out.extend(row.iter().map(|v| match most {
            0.0 => 1.0,
            _ => (v / most).max(1e-6),
        }));
    }
    out.into()
}

#[cfg(test)]
mod tests;
