//! The tokenizer that travels with the weights: `tokenizer.json`, or one made from a GGUF header.
//! Also text that appears token by token, though a character may be spread over several tokens.

use anyhow::{Result, anyhow};
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::quantized::tokenizer::TokenizerFromGguf;
use tokenizers::Tokenizer;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;

/// Reads a `tokenizer.json`.
pub(crate) fn from_json(bytes: &[u8]) -> Result<Tokenizer> {
    Tokenizer::from_bytes(bytes).map_err(|error| anyhow!("tokenizer.json: {error}"))
}

/// Makes the tokenizer that a GGUF header describes.
pub(crate) fn from_gguf(content: &Content) -> Result<Tokenizer> {
    let mut tokenizer = Tokenizer::from_gguf(content)?;
    let splitting = match content.metadata.get("tokenizer.ggml.pre") {
        Some(Value::String(name)) => name.as_str(),
        _ => "default",
    };
    // Candle knows how these split text. It takes all others for GPT-2 with a space put before each piece,
    // which they were not trained with, and forgets that some take digits one by one.
    if !matches!(splitting, "qwen2" | "llama3" | "smaug-bpe" | "lfm2") {
        let bytes = ByteLevel::new(false, true, true);
        if matches!(splitting, "smollm" | "starcoder" | "refact" | "command-r") {
            let pieces = vec![Digits::new(true).into(), bytes.into()];
            tokenizer.with_pre_tokenizer(Some(Sequence::new(pieces)));
        } else {
            tokenizer.with_pre_tokenizer(Some(bytes));
        }
    }
    Ok(tokenizer)
}

/// Ids of `text`. `whole` puts the tokens around it that the tokenizer wants at a text's ends.
pub(crate) fn encode(tokenizer: &Tokenizer, text: &str, whole: bool) -> Result<Vec<u32>> {
    let encoding = tokenizer
        .encode(text, whole)
        .map_err(|error| anyhow!("the text cannot be tokenized: {error}"))?;
    Ok(encoding.get_ids().to_vec())
}

/// Text that grows by tokens and is handed out in whole characters.
pub(crate) struct Stream<'a> {
    tokenizer: &'a Tokenizer,
    /// Tokens whose text has been handed out, but that the next one's text depends on, and those after.
    tokens: Vec<u32>,
    /// How many of `tokens` have been handed out.
    shown: usize,
}

impl<'a> Stream<'a> {
    /// An empty text.
    pub(crate) fn new(tokenizer: &'a Tokenizer) -> Self {
        Self {
            tokenizer,
            tokens: Vec::new(),
            shown: 0,
        }
    }

    /// Adds a token; answers the text that has become whole, often a word, at times nothing.
    pub(crate) fn push(&mut self, token: u32) -> Result<String> {
        self.tokens.push(token);
        let added = self.added()?;
        // Bytes of an unfinished character decode to the replacement character.
        if added.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(String::new());
        }
        self.tokens.drain(..self.shown);
        self.shown = self.tokens.len();
        Ok(added)
    }

    /// What is left when no more tokens come: an unfinished character, as replacement characters.
    pub(crate) fn finish(self) -> Result<String> {
        self.added()
    }

    fn added(&self) -> Result<String> {
        let old = self.decode(&self.tokens[..self.shown])?;
        let all = self.decode(&self.tokens)?;
        Ok(all.get(old.len()..).unwrap_or_default().to_owned())
    }

    fn decode(&self, tokens: &[u32]) -> Result<String> {
        self.tokenizer
            .decode(tokens, true)
            .map_err(|error| anyhow!("the tokens cannot be decoded: {error}"))
    }
}
