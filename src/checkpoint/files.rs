//! The small files beside the weights: configuration, tokenizer, chat templates, byte for byte.
//! They are a courtesy: what is too large, too many or unreadable is left out with a warning.

use std::collections::HashSet;
use std::path::Path;

use super::folder::Listing;
use super::source::{open, read_at};

/// Largest small file, in bytes.
const MAX_FILE: u64 = 64 << 20;
/// Most bytes of small files together.
const MAX_TOTAL: u64 = 512 << 20;
/// Most small files.
const MAX_FILES: usize = 256;
/// Where chat templates lie that are not the default one.
const TEMPLATES: &str = "additional_chat_templates";
/// Files that libraries ask for by name: these come first when not all fit.
const KNOWN: [&str; 27] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "params.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "image_processor_config.json",
    "feature_extractor_config.json",
    "quantize_config.json",
    "quantization_config.json",
    "adapter_config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
];

/// Every small file of a folder, sorted by name.
pub(super) fn of_folder(folder: &Path, listing: &Listing) -> Vec<(String, Vec<u8>)> {
    let mut names: Vec<String> = listing
        .files
        .iter()
        .filter(|n| is_small(n))
        .cloned()
        .collect();
    if listing.folders.iter().any(|f| f == TEMPLATES) {
        names.extend(templates(folder));
    }
    take(folder, names)
}

/// The small files that libraries ask for by name, beside a file that was named alone: whatever
/// else lies in its folder may belong to other models.
pub(super) fn beside(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut names: Vec<String> = KNOWN
        .iter()
        .filter(|n| folder.join(n).exists())
        .map(|n| n.to_string())
        .collect();
    names.extend(templates(folder));
    take(folder, names)
}

fn templates(folder: &Path) -> Vec<String> {
    let Ok(listing) = Listing::read(&folder.join(TEMPLATES)) else {
        return Vec::new();
    };
    listing
        .files
        .iter()
        .filter(|n| n.ends_with(".jinja"))
        .map(|n| format!("{TEMPLATES}/{n}"))
        .collect()
}

fn is_small(name: &str) -> bool {
    let index = name.ends_with(".index.json") || name.contains(".safetensors.index.");
    let ending = [".json", ".jinja", ".txt", ".model", ".tiktoken"];
    !index && (ending.iter().any(|e| name.ends_with(e)) || name == "vocab.bpe")
}

/// Reads the files, the ones with known names first, as far as the limits go.
fn take(folder: &Path, mut names: Vec<String>) -> Vec<(String, Vec<u8>)> {
    let known: HashSet<&str> = KNOWN.into();
    names.sort_by_key(|n| !known.contains(n.as_str()));
    if names.len() > MAX_FILES {
        tracing::warn!(
            "{}: {} small files, only {MAX_FILES} travel with the weights: {} and later ones are left out",
            folder.display(),
            names.len(),
            names[MAX_FILES]
        );
        names.truncate(MAX_FILES);
    }
    let mut out = Vec::new();
    let mut total = 0;
    for name in names {
        match read(&folder.join(&name), MAX_FILE.min(MAX_TOTAL - total)) {
            Ok(bytes) => {
                total += bytes.len() as u64;
                out.push((name, bytes));
            }
            Err(why) => tracing::warn!(
                "{}: left out, it does not travel with the weights: {why}",
                folder.join(&name).display()
            ),
        }
    }
    out.sort();
    out
}

fn read(path: &Path, limit: u64) -> Result<Vec<u8>, String> {
    let source = open(path).map_err(|e| e.to_string())?;
    let bytes = source.receipt.bytes;
    if bytes > limit {
        return Err(format!("{bytes} bytes, the limit is {limit}"));
    }
    let mut buffer = vec![0; bytes as usize];
    let got = read_at(&source.file, &mut buffer, 0).map_err(|e| e.to_string())?;
    if got < buffer.len() {
        return Err(format!(
            "it became shorter while it was read: {bytes} bytes, then {got}"
        ));
    }
    Ok(buffer)
}
