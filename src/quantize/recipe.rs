//! Recipes as people write them: `q4k`, or `default=q4k,lm_head=q6k,*.down_proj=q5k/q8_0,*norm*=stored`, or the same as
//! a TOML file. A recipe's text is read here; what it makes of a model is decided in [`super::assign`].

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::str::FromStr;

use serde::Deserialize;

use crate::manifest::ElementType;
use crate::pattern;

/// Most rules in one recipe.
const MAX_RULES: usize = 4096;
/// Most bytes of a recipe's text: it travels in every entry's key.
const MAX_TEXT: usize = 16 << 10;

/// Most bytes of a pattern: it is compared with every tensor's name.
const MAX_PATTERN: usize = 256;

/// The words for types, in the order in which help and errors list them.
pub const TYPES: &[(&str, Target)] = &[
    ("stored", Target::Stored),
    ("q2k", Target::As(ElementType::Q2K)),
    ("q3k", Target::As(ElementType::Q3K)),
    ("q4k", Target::As(ElementType::Q4K)),
    ("q5k", Target::As(ElementType::Q5K)),
    ("q6k", Target::As(ElementType::Q6K)),
    ("q8k", Target::As(ElementType::Q8K)),
    ("q4_0", Target::As(ElementType::Q4_0)),
    ("q4_1", Target::As(ElementType::Q4_1)),
    ("q5_0", Target::As(ElementType::Q5_0)),
    ("q5_1", Target::As(ElementType::Q5_1)),
    ("q8_0", Target::As(ElementType::Q8_0)),
    ("q8_1", Target::As(ElementType::Q8_1)),
    ("f16", Target::As(ElementType::F16)),
    ("bf16", Target::As(ElementType::BF16)),
    ("f32", Target::As(ElementType::F32)),
];

/// What a tensor is to become.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// What it would be without a recipe: as it is in the checkpoint, or as `--dtype` says.
    Stored,
    /// This type.
    As(ElementType),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Every target that can be made has a word.
        let word = TYPES.iter().find(|(_, t)| t == self).map(|(word, _)| *word);
        f.write_str(word.unwrap_or("?"))
    }
}

impl FromStr for Target {
    type Err = RecipeError;

    /// The words of [`TYPES`], in either case, `q4_k` as well as `q4k`.
    fn from_str(text: &str) -> Result<Self, RecipeError> {
        let lower = text.trim().to_ascii_lowercase();
        let plain = lower.replace("_k", "k");
        TYPES
            .iter()
            .find(|(word, _)| *word == lower || *word == plain)
            .map(|(_, target)| *target)
            .ok_or_else(|| RecipeError::Type {
                text: text.trim().to_string(),
            })
    }
}

/// What one rule asks for: a type, and what to fall back to, in order, where a row is no whole number of blocks.
pub(super) type Choice = Vec<Target>;

/// One rule: a pattern of names, and a choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rule {
    pub(super) pattern: String,
    pub(super) choice: Choice,
}

/// A recipe. Its text form is canonical: two recipes that mean the same have the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recipe {
    /// `None`: what no rule names stays as it is.
    pub(super) default: Option<Choice>,
    /// Sorted by pattern; each pattern once.
    pub(super) rules: Vec<Rule>,
}

/// Why a text is no recipe.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecipeError {
    /// No such type.
    #[error("there is no type `{text}`{}; there are: {}", mix(.text), TYPES.iter().map(|t| t.0).collect::<Vec<_>>().join(", "))]
    Type {
        /// The word.
        text: String,
    },
    /// A rule's type does not exist.
    #[error("the rule `{rule}`: {source}")]
    Rule {
        /// The rule.
        rule: String,
        /// What is wrong with it.
        source: Box<RecipeError>,
    },
    /// A part that is neither a type nor `pattern=type`.
    #[error(
        "`{part}` is no rule: write `pattern=type`, for instance `lm_head=q6k` or `default=q4k`"
    )]
    Part {
        /// The part.
        part: String,
    },
    /// One pattern, two types.
    #[error(
        "the rules `{pattern}={first}` and `{pattern}={second}` contradict each other: keep one"
    )]
    Twice {
        /// The pattern.
        pattern: String,
        /// What the first asks for.
        first: String,
        /// What the second asks for.
        second: String,
    },
    /// A pattern that could not be told from a rule's other parts, or is too long to be one.
    #[error(
        "`{pattern}` is no pattern: it must have 1 to {MAX_PATTERN} bytes, none of them `,` or `=`, a line's end or another \
         control character, and no space at its ends"
    )]
    Pattern {
        /// The pattern, escaped.
        pattern: String,
    },
    /// Nothing in it.
    #[error(
        "the recipe is empty: give a type, for instance `q4k`, or rules, for instance `default=q4k,lm_head=q6k`"
    )]
    Empty,
    /// Too long.
    #[error("the recipe has {found} {what}, the limit is {limit}: use patterns with `*`")]
    Limit {
        /// Of what.
        what: &'static str,
        /// How many there are.
        found: usize,
        /// How many there may be.
        limit: usize,
    },
    /// A file that cannot be read.
    #[error("the recipe file {path}: {source}")]
    File {
        /// The file.
        path: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// A file that is no such TOML.
    #[error(
        "the recipe file {path}: {what}; write `default = \"q4k\"` and, under `[rules]`, lines like `\"lm_head\" = \"q6k\"`"
    )]
    Toml {
        /// The file.
        path: String,
        /// The parser's words.
        what: String,
    },
    /// A file whose recipe is wrong.
    #[error("the recipe file {path}: {source}")]
    InFile {
        /// The file.
        path: String,
        /// What is wrong.
        source: Box<RecipeError>,
    },
}

/// A recipe as a TOML file writes it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    default: Option<String>,
    #[serde(default)]
    rules: BTreeMap<String, String>,
}

impl Recipe {
    /// Reads a recipe as the command line gives it: the path of a `.toml` file, or the recipe itself.
    ///
    /// # Errors
    /// Names the rule that is wrong.
    pub fn from_argument(text: &str) -> Result<Self, RecipeError> {
        let path = Path::new(text);
        let ending = path.extension().and_then(|e| e.to_str());
        let named = ending.is_some_and(|e| e.eq_ignore_ascii_case("toml"));
        if (named && !text.contains('=')) || path.is_file() {
            Self::from_file(path)
        } else {
            text.parse()
        }
    }

    /// Reads a TOML file: `default = "q4k"`, and a table `[rules]` of patterns and types.
    ///
    /// # Errors
    /// Names the file, and the rule that is wrong.
    pub fn from_file(path: &Path) -> Result<Self, RecipeError> {
        let shown = || path.display().to_string();
        let system = |source| RecipeError::File {
            path: shown(),
            source,
        };
        let meta = std::fs::metadata(path).map_err(system)?;
        if !meta.is_file() {
            return Err(system(std::io::Error::other("it is no regular file")));
        }
        if meta.len() > MAX_TEXT as u64 {
            return Err(RecipeError::InFile {
                path: shown(),
                source: Box::new(too_many("bytes", meta.len() as usize, MAX_TEXT)),
            });
        }
        let text = std::fs::read_to_string(path).map_err(system)?;
        let written: Written = toml::from_str(&text).map_err(|e| RecipeError::Toml {
            path: shown(),
            what: e.message().to_string(),
        })?;
        let default = written.default.map(|d| ("default".to_string(), d));
        Self::from_parts(default.into_iter().chain(written.rules)).map_err(|e| {
            RecipeError::InFile {
                path: shown(),
                source: Box::new(e),
            }
        })
    }

    fn from_parts(parts: impl Iterator<Item = (String, String)>) -> Result<Self, RecipeError> {
        let mut default: Option<Choice> = None;
        let mut rules: BTreeMap<String, Choice> = BTreeMap::new();
        for (pattern, text) in parts {
            let odd = |c: char| c == ',' || c == '=' || c.is_control();
            if pattern.is_empty()
                || pattern.len() > MAX_PATTERN
                || pattern.trim() != pattern
                || pattern.contains(odd)
            {
                let shown: String = pattern.chars().take(MAX_PATTERN).collect();
                return Err(RecipeError::Pattern {
                    pattern: shown.escape_debug().to_string(),
                });
            }
            let choice = choice(&text).map_err(|e| RecipeError::Rule {
                rule: format!("{pattern}={text}"),
                source: Box::new(e),
            })?;
            let known = match pattern.as_str() {
                "default" => default.replace(choice.clone()),
                _ => rules.insert(pattern.clone(), choice.clone()),
            };
            if let Some(known) = known
                && known != choice
            {
                return Err(RecipeError::Twice {
                    pattern,
                    first: spelled(&known),
                    second: spelled(&choice),
                });
            }
            if rules.len() > MAX_RULES {
                return Err(too_many("rules", rules.len(), MAX_RULES));
            }
        }
        if default.is_none() && rules.is_empty() {
            return Err(RecipeError::Empty);
        }
        let rules = rules.into_iter();
        Ok(Self {
            default,
            rules: rules
                .map(|(pattern, choice)| Rule { pattern, choice })
                .collect(),
        })
    }
}

impl FromStr for Recipe {
    type Err = RecipeError;

    fn from_str(text: &str) -> Result<Self, RecipeError> {
        if text.len() > MAX_TEXT {
            return Err(too_many("bytes", text.len(), MAX_TEXT));
        }
        let parts: Vec<&str> = text
            .split([',', '\n'])
            .map(str::trim)
            .filter(|part| !part.is_empty())
            .collect();
        if let [only] = parts.as_slice()
            && !only.contains('=')
        {
            let default = Some(choice(only)?);
            let rules = Vec::new();
            return Ok(Self { default, rules });
        }
        let split = parts.into_iter().map(|part| match part.split_once('=') {
            Some((pattern, types)) if !pattern.trim().is_empty() => {
                Ok((pattern.trim().to_string(), types.trim().to_string()))
            }
            _ => Err(RecipeError::Part {
                part: part.to_string(),
            }),
        });
        Self::from_parts(split.collect::<Result<Vec<_>, _>>()?.into_iter())
    }
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let (Some(default), []) = (&self.default, self.rules.as_slice()) {
            return f.write_str(&spelled(default));
        }
        let default = self.default.iter().map(|d| ("default", d));
        let rules = self.rules.iter().map(|r| (r.pattern.as_str(), &r.choice));
        for (i, (pattern, choice)) in default.chain(rules).enumerate() {
            let comma = if i > 0 { "," } else { "" };
            write!(f, "{comma}{pattern}={}", spelled(choice))?;
        }
        Ok(())
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.pattern, spelled(&self.choice))
    }
}

impl Rule {
    /// Whether the pattern is a name, and not a pattern of names.
    pub(super) fn is_exact(&self) -> bool {
        pattern::is_exact(&self.pattern)
    }

    /// Whether the rule names this tensor: by its whole name, or by its name without `.weight` at the end.
    pub(super) fn names(&self, tensor: &str) -> bool {
        pattern::names(&self.pattern, tensor)
    }
}

/// A word on names that people know from llama.cpp.
fn mix(text: &str) -> &'static str {
    let lower = text.to_ascii_lowercase();
    if ["_s", "_m", "_l", "_xl"].iter().any(|e| lower.ends_with(e)) {
        " (llama.cpp's mixes have no name here: `q4k` gives embeddings and output head a better type too)"
    } else {
        ""
    }
}

fn choice(text: &str) -> Result<Choice, RecipeError> {
    text.split('/').map(str::parse).collect()
}

fn spelled(choice: &[Target]) -> String {
    let words: Vec<String> = choice.iter().map(Target::to_string).collect();
    words.join("/")
}

fn too_many(what: &'static str, found: usize, limit: usize) -> RecipeError {
    RecipeError::Limit { what, found, limit }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recipe_reads_back_as_it_is_written() {
        for (text, canonical) in [
            ("q4k", "q4k"),
            ("Q4_K", "q4k"),
            (" q8_0 ", "q8_0"),
            ("q4k/q8_0", "q4k/q8_0"),
            ("default=q4k", "q4k"),
            (
                "lm_head=q6k, default=Q4K ,*.down_proj=q5k",
                "default=q4k,*.down_proj=q5k,lm_head=q6k",
            ),
            ("*norm*=stored", "*norm*=stored"),
            ("a=q4k,a=q4k", "a=q4k"),
        ] {
            let recipe: Recipe = text.parse().expect(text);
            assert_eq!(recipe.to_string(), canonical, "{text}");
            assert_eq!(canonical.parse::<Recipe>().expect(canonical), recipe);
        }
    }

    #[test]
    fn a_wrong_recipe_names_its_rule() {
        for (text, wanted) in [
            ("q9k", "no type `q9k`"),
            ("", "empty"),
            (",", "empty"),
            ("q4k,q5k", "`q4k` is no rule"),
            ("=q4k", "`=q4k` is no rule"),
            ("q4_k_m", "llama.cpp's mixes"),
            ("lm_head=q7", "the rule `lm_head=q7`: there is no type `q7`"),
            ("a=q4k,a=q5k", "`a=q4k` and `a=q5k` contradict"),
            ("a=", "the rule `a=`"),
        ] {
            let error = text.parse::<Recipe>().expect_err(text).to_string();
            assert!(error.contains(wanted), "{text}: {error}");
        }
        let long = "a=q4k,".repeat(MAX_TEXT);
        assert!(matches!(
            long.parse::<Recipe>(),
            Err(RecipeError::Limit { .. })
        ));
    }

    #[test]
    fn a_file_says_the_same_as_a_text() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("recipe.toml");
        let read = |text: &str| {
            std::fs::write(&path, text).expect("written");
            Recipe::from_argument(path.to_str().expect("UTF-8"))
        };
        let recipe =
            read("default = \"q4k\"\n[rules]\nlm_head = \"q6k\"\n\"*.down_proj\" = \"q5k/q8_0\"\n");
        assert_eq!(
            recipe.expect("a recipe").to_string(),
            "default=q4k,*.down_proj=q5k/q8_0,lm_head=q6k"
        );
        for (text, wanted) in [
            ("defualt = \"q4k\"", "unknown field `defualt`"),
            ("default = 4", "recipe.toml"),
            ("[rules]\na = \"q9\"", "the rule `a=q9`"),
            ("[rules]\n\"a=q4k,b\" = \"q8_0\"", "`a=q4k,b` is no pattern"),
            ("[rules]\n\" a\" = \"q8_0\"", "` a` is no pattern"),
            ("[rules]\n\"a\\nb\" = \"q8_0\"", "is no pattern"),
            ("", "empty"),
        ] {
            let error = read(text).expect_err(text).to_string();
            assert!(
                error.contains(wanted) && error.contains("recipe.toml"),
                "{text}: {error}"
            );
        }
        let gone = Recipe::from_argument("nowhere.toml").expect_err("no file");
        assert!(gone.to_string().contains("nowhere.toml"));
    }
}
