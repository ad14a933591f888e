//! A conversation: its turns, the model's own chat template, and the tokens that end an answer.
//! Everything is read from the small files that travel with the weights.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail};
use candle_core::quantized::gguf_file::{Content, Value as GgufValue};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Value, from_args};
use minijinja::{Environment, ErrorKind, context};
use serde_json::Value as Json;
use tokenizers::Tokenizer;

use crate::tokenizer;

/// What a model brings along to talk with it.
pub(crate) struct Manners {
    /// Text to tokens and back.
    pub(crate) tokenizer: Tokenizer,
    /// Tokens that end an answer.
    pub(crate) stops: BTreeSet<u32>,
    template: Option<String>,
    begin: String,
    end: String,
}

impl Manners {
    /// From the header of a GGUF file.
    pub(crate) fn from_gguf(content: &Content) -> Result<Self> {
        let tokenizer = tokenizer::from_gguf(content)?;
        let id = |key: &str| {
            let value = content.metadata.get(&format!("tokenizer.ggml.{key}"))?;
            u32::try_from(value.to_u64().ok()?).ok()
        };
        let spelled = |id: Option<u32>| {
            id.and_then(|id| tokenizer.id_to_token(id))
                .unwrap_or_default()
        };
        let template = match content.metadata.get("tokenizer.chat_template") {
            Some(GgufValue::String(text)) => Some(text.clone()),
            _ => None,
        };
        Ok(Self {
            begin: spelled(id("bos_token_id")),
            end: spelled(id("eos_token_id")),
            stops: ["eos_token_id", "eot_token_id", "eom_token_id"]
                .iter()
                .filter_map(|key| id(key))
                .collect(),
            template,
            tokenizer,
        })
    }

    /// From the files of a Hugging Face folder, by name.
    pub(crate) fn from_files(file: impl Fn(&str) -> Option<Vec<u8>>) -> Result<Self> {
        let json = |name: &str| match file(name) {
            Some(bytes) => serde_json::from_slice::<Json>(&bytes).with_context(|| name.to_owned()),
            None => Ok(Json::Null),
        };
        let bytes = file("tokenizer.json").context("the model carries no tokenizer.json")?;
        let tokenizer = tokenizer::from_json(&bytes)?;
        let about = json("tokenizer_config.json")?;
        let template = match file("chat_template.jinja") {
            Some(bytes) => Some(String::from_utf8(bytes).context("chat_template.jinja")?),
            None => named_template(&about["chat_template"]),
        };
        let mut stops = BTreeSet::new();
        for name in ["generation_config.json", "config.json"] {
            collect_ids(&json(name)?["eos_token_id"], &mut stops);
        }
        let end = spelling(&about["eos_token"]);
        stops.extend(tokenizer.token_to_id(&end));
        Ok(Self {
            begin: spelling(&about["bos_token"]),
            end,
            stops,
            template,
            tokenizer,
        })
    }

    fn render(&self, turns: &[Turn]) -> Result<String> {
        let Some(template) = &self.template else {
            bail!("the model carries no chat template: continue plain text with --raw")
        };
        let turns: Vec<Value> = turns
            .iter()
            .map(|turn| context! { role => turn.role, content => turn.text.as_str() })
            .collect();
        environment()?
            .render_str(
                template,
                context! {
                    messages => turns,
                    add_generation_prompt => true,
                    bos_token => self.begin.as_str(),
                    eos_token => self.end.as_str(),
                },
            )
            .context("the model's chat template")
    }
}

struct Turn {
    role: &'static str,
    text: String,
}

/// The turns of one conversation.
pub(crate) struct Chat {
    turns: Vec<Turn>,
}

impl Chat {
    /// A conversation that begins with `system`, or as the model's template has it.
    pub(crate) fn new(system: Option<&str>) -> Self {
        let turns = system.map(|text| Turn {
            role: "system",
            text: text.to_owned(),
        });
        Self {
            turns: turns.into_iter().collect(),
        }
    }

    /// Says `text` to the model, and answers the tokens of the whole conversation so far.
    pub(crate) fn ask(&mut self, manners: &Manners, text: &str) -> Result<Vec<u32>> {
        self.turns.push(Turn {
            role: "user",
            text: text.to_owned(),
        });
        tokenizer::encode(&manners.tokenizer, &manners.render(&self.turns)?, false)
    }

    /// Keeps the model's answer for the next turn.
    pub(crate) fn answer(&mut self, text: String) {
        self.turns.push(Turn {
            role: "assistant",
            text,
        });
    }
}

/// A token is spelled as a string, or as a map with its flags.
fn spelling(token: &Json) -> String {
    let text = token.as_str().or_else(|| token["content"].as_str());
    text.unwrap_or_default().to_owned()
}

/// A template is a string, or a list of named ones, of which `default` is for chats.
fn named_template(templates: &Json) -> Option<String> {
    let chosen = match templates {
        Json::Array(list) => list.iter().find(|one| one["name"] == "default")?["template"].as_str(),
        other => other.as_str(),
    };
    chosen.map(str::to_owned)
}

/// An id is a number, or a list of numbers.
fn collect_ids(ids: &Json, into: &mut BTreeSet<u32>) {
    let list = ids
        .as_array()
        .map_or(std::slice::from_ref(ids), Vec::as_slice);
    let numbers = list.iter().filter_map(Json::as_u64);
    into.extend(numbers.filter_map(|id| u32::try_from(id).ok()));
}

/// Jinja as chat templates are written for: tags take their line with them, and values have Python's methods.
fn environment() -> Result<Environment<'static>> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()?;
    environment.set_syntax(syntax);
    environment.add_function("raise_exception", |text: String| {
        Err::<Value, _>(minijinja::Error::new(ErrorKind::InvalidOperation, text))
    });
    environment.set_unknown_method_callback(|state, value, method, args| {
        if let Some(text) = value.as_str() {
            return string_method(text, method, args);
        }
        match method {
            "items" => state.apply_filter("items", std::slice::from_ref(value)),
            "keys" => Ok(Value::from_iter(value.try_iter()?)),
            _ => Err(ErrorKind::UnknownMethod.into()),
        }
    });
    Ok(environment)
}

fn string_method(text: &str, method: &str, args: &[Value]) -> Result<Value, minijinja::Error> {
    let set = || -> Result<Vec<char>, minijinja::Error> {
        let (set,): (Option<&str>,) = from_args(args)?;
        Ok(set.unwrap_or(" \t\r\n").chars().collect())
    };
    Ok(match method {
        "strip" => text.trim_matches(set()?.as_slice()).into(),
        "lstrip" => text.trim_start_matches(set()?.as_slice()).into(),
        "rstrip" => text.trim_end_matches(set()?.as_slice()).into(),
        "startswith" => text.starts_with(from_args::<(&str,)>(args)?.0).into(),
        "endswith" => text.ends_with(from_args::<(&str,)>(args)?.0).into(),
        "upper" => text.to_uppercase().into(),
        "lower" => text.to_lowercase().into(),
        "replace" => {
            let (old, new): (&str, &str) = from_args(args)?;
            text.replace(old, new).into()
        }
        "split" => match from_args::<(Option<&str>,)>(args)?.0 {
            Some(separator) => Value::from_iter(text.split(separator)),
            None => Value::from_iter(text.split_whitespace()),
        },
        _ => return Err(ErrorKind::UnknownMethod.into()),
    })
}
