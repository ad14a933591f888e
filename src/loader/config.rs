//! What an engine wants to attach to, and how patient it is: [`IpcConfig`].
//! Every setting can also be given as text; one that does not exist is refused by name.

use std::path::PathBuf;
use std::time::Duration;

use super::naming::{Naming, Renaming};
use crate::manifest::Digest;
use crate::protocol::{EpochId, MAX_WAIT, TARGET};
use crate::shard::{Part, ShardId};

/// What to attach to, and on which terms.
#[derive(Clone, Debug)]
pub struct IpcConfig {
    pub(super) name: String,
    pub(super) role: String,
    pub(super) shard: ShardId,
    pub(super) epoch: Option<EpochId>,
    pub(super) socket_dir: Option<PathBuf>,
    pub(super) checkpoint: Option<PathBuf>,
    pub(super) root: Option<Digest>,
    pub(super) trust_name: bool,
    pub(super) connect_timeout: Duration,
    pub(super) state_timeout: Duration,
    pub(super) wait: bool,
    pub(super) strict: bool,
    pub(super) dequantize: bool,
    pub(super) verify: bool,
    pub(super) copy: bool,
    pub(super) hand_off: bool,
    pub(super) allow_uids: Vec<u32>,
    pub(super) naming: Naming,
}

/// Why a setting given as text was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OptionError {
    /// There is no such option.
    #[error("there is no option `{key}`; there are: {}", OPTIONS.join(", "))]
    Unknown {
        /// The option asked for.
        key: String,
    },
    /// The value is none that the option takes.
    #[error("option `{key}`: `{value}` is not {wanted}")]
    Value {
        /// The option.
        key: String,
        /// The value given.
        value: String,
        /// What it takes.
        wanted: &'static str,
    },
}

/// Every option that [`IpcConfig::option`] knows.
pub const OPTIONS: &[&str] = &[
    "allow_uid",
    "checkpoint",
    "connect_timeout",
    "copy",
    "dequantize",
    "dp",
    "ep",
    "epoch",
    "hand_off",
    "pp",
    "prefix",
    "rename",
    "role",
    "root",
    "socket_dir",
    "state_timeout",
    "strict",
    "tp",
    "trust_name",
    "verify",
    "wait",
];

impl IpcConfig {
    /// The entry `name`, in the role `target`, from the daemon in the usual place.
    ///
    /// Waits 5 s for the daemon's answer and, where the entry is still loading, 10 minutes for that.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            role: TARGET.into(),
            shard: ShardId::default(),
            epoch: None,
            socket_dir: None,
            checkpoint: None,
            root: None,
            trust_name: false,
            connect_timeout: Duration::from_secs(5),
            state_timeout: Duration::from_secs(600),
            wait: true,
            strict: false,
            dequantize: false,
            verify: false,
            copy: false,
            hand_off: false,
            allow_uids: Vec::new(),
            naming: Naming::default(),
        }
    }

    /// The role: `target`, `draft`, or a word of the operator's.
    pub fn role(mut self, role: impl Into<String>) -> Self {
        self.role = role.into();
        self
    }

    /// The part of the model that the entry holds, as it was loaded; by default all of it.
    pub fn shard(mut self, shard: ShardId) -> Self {
        self.shard = shard;
        self
    }

    /// The entry that holds the slices of rank `rank` of `size`, as `candle-cache load --tp` makes it.
    ///
    /// The ranks of one load are one set under one id. So that no two sets mix, rank 0 attaches and hands
    /// [`IpcCache::epoch`](super::IpcCache::epoch) to the others, which attach with [`IpcConfig::epoch`].
    pub fn tensor_parallel(mut self, rank: u16, size: u16) -> Self {
        self.shard.tp = Part::new(rank, size);
        self
    }

    /// This epoch and no other. Of a set of ranks that was replaced, every rank can be had for as long as an engine
    /// holds one of them.
    pub fn epoch(mut self, epoch: EpochId) -> Self {
        self.epoch = Some(epoch);
        self
    }

    /// The daemon's socket folder, instead of the usual places.
    pub fn socket_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.socket_dir = Some(folder.into());
        self
    }

    /// The checkpoint that is meant, a file or a folder: other weights under the same name are refused.
    pub fn checkpoint(mut self, path: impl Into<PathBuf>) -> Self {
        self.checkpoint = Some(path.into());
        self
    }

    /// The root digest of the weights that are meant, as `candle-cache status` prints it.
    pub fn root(mut self, root: Digest) -> Self {
        self.root = Some(root);
        self
    }

    /// Takes the name as proof enough, and does not look at the files that the entry was loaded from.
    pub fn trust_name(mut self, trust: bool) -> Self {
        self.trust_name = trust;
        self
    }

    /// How long to wait for a connection and the first answer; a day at most.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout.min(MAX_WAIT);
        self
    }

    /// How long to wait for an entry that is loading; a day at most.
    pub fn state_timeout(mut self, timeout: Duration) -> Self {
        self.state_timeout = timeout.min(MAX_WAIT);
        self
    }

    /// Whether to wait for an entry that is loading (the default), or be refused.
    pub fn wait(mut self, wait: bool) -> Self {
        self.wait = wait;
        self
    }

    /// Makes every conversion from the stored dtype an error. A tensor that [`IpcConfig::dequantize`] allows for
    /// is served all the same, but as F32 alone, which is what its blocks are dequantized to.
    pub fn strict(mut self, strict: bool) -> Self {
        self.strict = strict;
        self
    }

    /// Answers a plain request for GGML blocks with candle's own `QTensor::dequantize`, in the dtype asked for.
    /// Without it such a request is an error.
    ///
    /// Each such tensor is memory of this engine's own, several times the size of its blocks;
    /// [`Report::dequantized`](super::Report::dequantized) counts it.
    pub fn dequantize(mut self, dequantize: bool) -> Self {
        self.dequantize = dequantize;
        self
    }

    /// Hashes all weights at attach and compares them with what was loaded.
    pub fn verify(mut self, verify: bool) -> Self {
        self.verify = verify;
        self
    }

    /// Copies every tensor into memory of candle's own at attach, and lets the shared memory and the lease go.
    ///
    /// The engine then takes the weights' size a second time, and may write to them. A type that candle has
    /// no tensor for is copied where the processor can read it, on the host.
    pub fn copy(mut self, copy: bool) -> Self {
        self.copy = copy;
        self
    }

    /// Copies (see [`IpcConfig::copy`]), then asks the daemon to unload the epoch that was copied. It does
    /// so unless somebody else holds it or loads its successor; [`Report::hand_off`](super::Report::hand_off)
    /// says which.
    pub fn hand_off(mut self, hand_off: bool) -> Self {
        self.hand_off = hand_off;
        self
    }

    /// Accepts a daemon that runs as this user too.
    pub fn allow_uid(mut self, uid: u32) -> Self {
        self.allow_uids.push(uid);
        self
    }

    /// Prepended to every name that a model asks for, dot included: with `prefix("model.")`, `norm.weight` finds
    /// `model.norm.weight`. Whatever hands out weights honours it, and so does every check whether a name is there.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.naming.prefix = prefix.into();
        self
    }

    /// Replaces the prefix `from` of a name that a model asks for by `to`: with
    /// `rename("model.", "language_model.model.")`, `model.norm.weight` finds `language_model.model.norm.weight`.
    ///
    /// May be called several times; the first `from` with which a name begins is replaced, and no other.
    /// [`IpcConfig::prefix`] comes after that.
    pub fn rename(mut self, from: impl Into<String>, to: impl Into<String>) -> Self {
        self.naming.renames.push(Renaming {
            from: from.into(),
            to: to.into(),
        });
        self
    }

    /// Whether the engine is to have weights of its own.
    pub(super) fn copies(&self) -> bool {
        self.copy || self.hand_off
    }

    /// Sets one option from text, for instance from a command line: `option("connect_timeout", "5s")`.
    ///
    /// # Errors
    /// When there is no such option, or the value is none that it takes.
    pub fn option(self, key: &str, value: &str) -> Result<Self, OptionError> {
        let wrong = |wanted| OptionError::Value {
            key: key.into(),
            value: value.into(),
            wanted,
        };
        let flag = || match value {
            "true" | "yes" | "on" | "1" => Ok(true),
            "false" | "no" | "off" | "0" => Ok(false),
            _ => Err(wrong("true or false")),
        };
        let part = || {
            value
                .parse::<Part>()
                .map_err(|_| wrong("a rank such as 0/2"))
        };
        let duration =
            || parse_duration(value).ok_or_else(|| wrong("a time such as 500ms, 5s, 10m or 2h"));
        Ok(match key {
            "allow_uid" => {
                self.allow_uid(value.parse().map_err(|_| wrong("the number of a user"))?)
            }
            "checkpoint" => self.checkpoint(value),
            "connect_timeout" => self.connect_timeout(duration()?),
            "copy" => self.copy(flag()?),
            "dequantize" => self.dequantize(flag()?),
            "dp" | "ep" | "pp" | "tp" => {
                let mut shard = self.shard;
                *match key {
                    "dp" => &mut shard.dp,
                    "ep" => &mut shard.ep,
                    "pp" => &mut shard.pp,
                    _ => &mut shard.tp,
                } = part()?;
                self.shard(shard)
            }
            "hand_off" => self.hand_off(flag()?),
            "epoch" => self.epoch(
                value
                    .parse()
                    .map_err(|_| wrong("an epoch's 32 hexadecimal digits"))?,
            ),
            "prefix" => self.prefix(value),
            "rename" => {
                let parts = value.split_once('=');
                let (from, to) = parts
                    .filter(|(from, to)| !from.is_empty() && !to.contains('='))
                    .ok_or_else(|| wrong("two prefixes, FROM=TO, of which TO may be empty"))?;
                self.rename(from, to)
            }
            "role" => self.role(value),
            "root" => self.root(
                value
                    .parse()
                    .map_err(|_| wrong("a digest of 64 hexadecimal digits"))?,
            ),
            "socket_dir" => self.socket_dir(value),
            "state_timeout" => self.state_timeout(duration()?),
            "strict" => self.strict(flag()?),
            "trust_name" => self.trust_name(flag()?),
            "verify" => self.verify(flag()?),
            "wait" => self.wait(flag()?),
            _ => return Err(OptionError::Unknown { key: key.into() }),
        })
    }
}

fn parse_duration(text: &str) -> Option<Duration> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let count: u64 = digits.parse().ok()?;
    let seconds = |unit: u64| count.checked_mul(unit).map(Duration::from_secs);
    match &text[digits.len()..] {
        "ms" => Some(Duration::from_millis(count)),
        "s" => seconds(1),
        "m" => seconds(60),
        "h" => seconds(3600),
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_listed_option_is_known_and_an_unknown_one_is_named_with_the_list() {
        for key in OPTIONS {
            let values = [
                "5s",
                "true",
                "7",
                "1/2",
                &"0a".repeat(16),
                &"0b".repeat(32),
                "x",
                "a.=b.",
            ];
            let taken = values
                .iter()
                .any(|v| IpcConfig::new("m").option(key, v).is_ok());
            assert!(taken, "{key}");
        }
        let error = IpcConfig::new("m")
            .option("conect_timeout", "5s")
            .expect_err("a misspelt option");
        let text = error.to_string();
        assert!(
            text.contains("`conect_timeout`") && text.contains("connect_timeout"),
            "{text}"
        );
    }

    #[test]
    fn a_rename_given_as_text_has_two_sides() {
        let config = IpcConfig::new("m").option("rename", "a.=b.").unwrap();
        let config = config.option("rename", "c.=").unwrap();
        let config = config.option("prefix", "p.").unwrap();
        assert_eq!(config.naming.held("a.w"), "p.b.w");
        assert_eq!(config.naming.held("c.w"), "p.w");
        for wrong in ["", "a.", "=b.", "a.=b.=c."] {
            let error = IpcConfig::new("m").option("rename", wrong).unwrap_err();
            assert!(error.to_string().contains("FROM=TO"), "{error}");
        }
    }

    #[test]
    fn times_are_read_with_their_unit_only() {
        assert_eq!(parse_duration("500ms"), Some(Duration::from_millis(500)));
        assert_eq!(parse_duration("10m"), Some(Duration::from_secs(600)));
        for wrong in [
            "",
            "5",
            "s",
            "-1s",
            "5 s",
            "5d",
            "1.5s",
            "18446744073709551615h",
            "5µs",
        ] {
            assert_eq!(parse_duration(wrong), None, "{wrong}");
        }
    }
}
