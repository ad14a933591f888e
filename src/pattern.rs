//! Patterns of tensor names, as recipes and shard plans write them: `*.down_proj`, `model.layers.?.*`, `lm_head`.
//! `*` stands for any characters, dots included, and `?` for one.

/// Whether `pattern` is a name, and not a pattern of names.
pub(crate) fn is_exact(pattern: &str) -> bool {
    !pattern.contains(['*', '?'])
}

/// Whether `pattern` names this tensor: by its whole name, or by its name without `.weight` at the end.
pub(crate) fn names(pattern: &str, tensor: &str) -> bool {
    let short = tensor.strip_suffix(".weight");
    matches(pattern, tensor) || short.is_some_and(|short| matches(pattern, short))
}

/// The name that comes closest to a pattern that names none.
pub(crate) fn nearest<'a>(pattern: &str, tensors: impl Iterator<Item = &'a str>) -> Option<String> {
    let plain = pattern.replace(['*', '?'], "");
    let likeness = |name: &str| {
        let short = name.strip_suffix(".weight").unwrap_or(name);
        strsim::jaro_winkler(&plain, short).max(if short.ends_with(&plain) { 0.99 } else { 0.0 })
    };
    let likest = tensors.map(|name| (likeness(name), name));
    let (likeness, name) = likest.max_by(|a, b| a.0.total_cmp(&b.0))?;
    (likeness > 0.7).then(|| name.to_string())
}

/// Whether all of `text` fits `pattern`, in which `*` stands for any characters and `?` for one.
fn matches(pattern: &str, text: &str) -> bool {
    let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
    let (mut p, mut t) = (0, 0);
    // Where the last star stands, and how far into the text it has been taken to reach.
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, t));
                p += 1;
            }
            Some(c) if *c == b'?' || *c == text[t] => {
                p += 1;
                t += 1;
            }
            _ => match star {
                Some((at, reach)) => {
                    star = Some((at, reach + 1));
                    p = at + 1;
                    t = reach + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|c| *c == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_reach_over_dots_and_a_name_needs_no_weight_at_its_end() {
        for (pattern, text, fits) in [
            ("a", "a", true),
            ("a", "ab", false),
            ("*", "", true),
            ("*.down_proj", "model.layers.0.mlp.down_proj", true),
            ("*norm*", "model.norm.weight", true),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("*a*b*c", "xaxbxbxc", true),
            ("*a*b*c", "xaxbxbx", false),
        ] {
            assert_eq!(matches(pattern, text), fits, "{pattern} {text}");
        }
        assert!(names("lm_head", "lm_head.weight") && names("lm_head", "lm_head"));
        assert!(!names("lm_head", "lm_head.bias"));
    }
}
