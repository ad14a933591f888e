//! What a model calls its weights, and what the checkpoint calls them.
//! Every name that is asked for goes through here, on its way to the manifest.

use std::borrow::Cow;
use std::fmt;

/// One prefix of the names that a model asks for, and what stands for it in the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Renaming {
    /// With what a name begins as it is asked for; empty: with anything.
    pub from: String,
    /// With what it begins in the checkpoint.
    pub to: String,
}

impl Renaming {
    /// The name in the checkpoint; `None` where this is not about `asked`.
    pub(crate) fn apply(&self, asked: &str) -> Option<String> {
        let rest = asked.strip_prefix(&self.from)?;
        Some(format!("{}{rest}", self.to))
    }
}

/// As the call that brings it about.
impl fmt::Display for Renaming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, to } = self;
        if from.is_empty() {
            write!(f, "IpcConfig::prefix({to:?})")
        } else {
            write!(f, "IpcConfig::rename({from:?}, {to:?})")
        }
    }
}

/// How an engine's names become the checkpoint's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Naming {
    /// The first that a name begins with replaces that beginning.
    pub renames: Vec<Renaming>,
    /// Prepended then, to every name.
    pub prefix: String,
}

impl Naming {
    /// Whether every name is the checkpoint's own.
    pub fn is_empty(&self) -> bool {
        self.renames.is_empty() && self.prefix.is_empty()
    }

    /// What the checkpoint calls `asked`.
    pub fn held<'a>(&self, asked: &'a str) -> Cow<'a, str> {
        if self.is_empty() {
            return Cow::Borrowed(asked);
        }
        let renamed = self.renames.iter().find_map(|rename| rename.apply(asked));
        let name = renamed.map_or(Cow::Borrowed(asked), Cow::Owned);
        if self.prefix.is_empty() {
            return name;
        }
        Cow::Owned(format!("{}{name}", self.prefix))
    }
}

/// As a report shows it.
impl fmt::Display for Naming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("as in the checkpoint");
        }
        let mut between = "";
        for Renaming { from, to } in &self.renames {
            write!(f, "{between}`{from}` read as `{to}`")?;
            between = ", ";
        }
        if !self.prefix.is_empty() {
            write!(f, "{between}prefix `{}`", self.prefix)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_rename_that_matches_applies_and_then_the_prefix() {
        let rename = |from: &str, to: &str| Renaming {
            from: from.into(),
            to: to.into(),
        };
        let mut naming = Naming {
            renames: vec![rename("a.", "b."), rename("b.", "c."), rename("a", "d")],
            prefix: String::new(),
        };
        assert_eq!(naming.held("a.w"), "b.w");
        assert_eq!(naming.held("b.w"), "c.w");
        assert_eq!(naming.held("ab"), "db");
        assert!(matches!(naming.held("x.a.w"), Cow::Borrowed("x.a.w")));
        naming.prefix = "p.".into();
        assert_eq!(naming.held("a.w"), "p.b.w");
        assert_eq!(naming.held("x"), "p.x");
    }
}
