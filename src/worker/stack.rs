//! Finds the experts of each layer, `prefix.experts.0.suffix` and so on, which can lie one behind the other so that all
//! of them are one tensor too: `prefix.experts.suffix`, with the experts along its first dimension.

use std::collections::BTreeMap;

use crate::checkpoint::SourceTensor;

use super::taken::Becomes;

/// Experts that are to lie one behind the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// The name of all of them together.
    pub name: String,
    /// The experts, in their order: indices into the taken tensors.
    pub members: Vec<usize>,
}

/// Why experts cannot be stacked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StackError {
    /// There are none.
    #[error(
        "no tensor here is an expert's, which would be named like `layers.0.mlp.experts.0.gate_proj.weight`: load it \
         without --stack-experts"
    )]
    NoExperts,
    /// Some are missing.
    #[error(
        "the experts of `{name}` are {found}, and would be stacked as 0 to {last}: take all of them, or load them without \
         --stack-experts"
    )]
    Numbers {
        /// The stack.
        name: String,
        /// The numbers that are there, as far as they are shown.
        found: String,
        /// How many there are, less one.
        last: usize,
    },
    /// They differ.
    #[error(
        "the experts `{first}` ({of_first}) and `{other}` ({of_other}) differ, and cannot be one tensor: load them without \
         --stack-experts"
    )]
    Differ {
        /// One expert.
        first: String,
        /// Its type, shape and cut.
        of_first: String,
        /// Another expert.
        other: String,
        /// Its type, shape and cut.
        of_other: String,
    },
    /// The name is taken.
    #[error(
        "there is a tensor `{name}` already, and stacked experts would have that name: load them without --stack-experts"
    )]
    Taken {
        /// The name.
        name: String,
    },
}

/// The stack that a tensor belongs to, and which expert of it it is.
pub(super) fn place(name: &str) -> Option<(String, u64)> {
    let parts: Vec<&str> = name.split('.').collect();
    let at = parts
        .iter()
        .zip(parts.iter().skip(1))
        .position(|(word, number)| {
            *word == "experts" && !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit())
        })?;
    let suffix = parts.get(at + 2..).filter(|suffix| !suffix.is_empty())?;
    let number = parts[at + 1].parse().ok()?;
    let stack = [&parts[..=at], suffix].concat().join(".");
    Some((stack, number))
}

/// The experts among `tensors`, by stack.
///
/// # Errors
/// Names the stack that cannot be made.
pub(super) fn find(
    tensors: &[SourceTensor],
    becomes: &[Becomes],
) -> Result<Vec<Group>, StackError> {
    let mut stacks: BTreeMap<String, BTreeMap<u64, usize>> = BTreeMap::new();
    for (index, tensor) in tensors.iter().enumerate() {
        if let Some((stack, number)) = place(&tensor.name) {
            stacks.entry(stack).or_default().insert(number, index);
        }
    }
    if stacks.is_empty() {
        return Err(StackError::NoExperts);
    }
    let described = |index: usize| {
        let tensor = &tensors[index];
        let cut = match &tensor.slice {
            Some(slice) => format!(", cut along dimension {}", slice.cut.dim),
            None => String::new(),
        };
        format!("{} {:?}{cut}", becomes[index].element, tensor.shape)
    };
    let group = |(name, experts): (String, BTreeMap<u64, usize>)| {
        if tensors.binary_search_by(|t| t.name.cmp(&name)).is_ok() {
            return Err(StackError::Taken { name });
        }
        if !experts.keys().copied().eq(0..experts.len() as u64) {
            let shown: Vec<String> = experts.keys().take(16).map(u64::to_string).collect();
            return Err(StackError::Numbers {
                name,
                found: shown.join(", "),
                last: experts.len() - 1,
            });
        }
        let members: Vec<usize> = experts.into_values().collect();
        let first = members[0];
        let other = members.iter().find(|i| described(**i) != described(first));
        if let Some(other) = other {
            return Err(StackError::Differ {
                first: tensors[first].name.clone(),
                of_first: described(first),
                other: tensors[*other].name.clone(),
                of_other: described(*other),
            });
        }
        Ok(Group { name, members })
    };
    stacks
        .into_iter()
        // Nothing of nothing has no place to lie at.
        .filter(|(_, experts)| experts.values().all(|i| tensors[*i].bytes > 0))
        .map(group)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_are_found_by_their_number_wherever_it_stands() {
        for (name, stack, number) in [
            ("a.experts.7.w.weight", "a.experts.w.weight", 7),
            ("experts.0.w", "experts.w", 0),
            ("m.experts.x.experts.12.w", "m.experts.x.experts.w", 12),
        ] {
            assert_eq!(place(name), Some((stack.into(), number)), "{name}");
        }
        for name in [
            "a.experts.w",
            "a.experts.1",
            "a.expert.1.w",
            "experts",
            "a.experts..w",
            "a.experts.99999999999999999999.w",
        ] {
            assert_eq!(place(name), None, "{name}");
        }
    }
}
