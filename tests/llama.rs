//! The llama example against stock candle, on a real model, from files: the same logits, tokens and text.
//! The same through the cache is in llama_cache.rs.

#[path = "../examples/llama/chat.rs"]
mod chat;
#[allow(dead_code, reason = "the example uses all of it")]
#[path = "../examples/llama/quantized.rs"]
mod quantized;
mod support;
#[path = "../examples/llama/tokenizer.rs"]
mod tokenizer;

use std::io::Write;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device};
use candle_nn::VarBuilder;
use chat::{Chat, Manners};
use quantized::{Config, GgufFile, Llama};
use support::{COUNT, PROMPT};

#[test]
fn the_example_answers_the_same_logits_as_stock_quantized_llama() -> Result<()> {
    let (tokens, logits) = support::stock_quantized()?;
    assert_eq!(tokens.len(), COUNT);

    let file = GgufFile::open(&support::gguf()?, &Device::Cpu)?;
    let config = Config::from_gguf(file.content())?;
    let mut model = Llama::load(&file, &config, 4096, &Device::Cpu)?;
    let mut answer =
        |count| support::greedy(count, |tokens, position| model.forward(tokens, position));
    let first = answer(COUNT)?;
    assert_eq!(&first.0, tokens);
    assert!(&first.1 == logits, "logits differ in some bit");
    // A second text on the same model starts from nothing.
    assert!(
        answer(4)?.1 == logits[..4],
        "the first text was not forgotten"
    );
    Ok(())
}

#[test]
fn a_dequantized_checkpoint_gives_stock_llama_the_same_tokens() -> Result<()> {
    let folder = support::dense_folder()?;
    let path = folder.join("model.safetensors");
    // SAFETY: nobody writes to the file; it is replaced by renaming alone.
    let weights =
        unsafe { VarBuilder::from_mmaped_safetensors(&[path], DType::F32, &Device::Cpu)? };
    assert!(
        !weights.contains_tensor("lm_head.weight"),
        "the output is tied"
    );
    let dense = support::stock_dense(weights, &folder)?;
    assert_eq!(dense, support::stock_quantized()?.0);
    Ok(())
}

#[test]
fn the_program_prints_the_same_tokens_from_a_file_and_from_a_folder() -> Result<()> {
    for model in [support::gguf()?, support::dense_folder()?] {
        let output = Command::new(support::example()?)
            .args(["--no-cache", "--raw", "--print-tokens", "--max-tokens"])
            .args([&COUNT.to_string(), "--prompt", PROMPT, "--model"])
            .arg(&model)
            .stderr(Stdio::inherit())
            .output()?;
        ensure!(output.status.success(), "{}", output.status);
        let text = String::from_utf8(output.stdout)?;
        let tokens: Vec<u32> = text.lines().map(str::parse).collect::<Result<_, _>>()?;
        assert_eq!(tokens, support::stock_quantized()?.0, "{}", model.display());
    }
    Ok(())
}

#[test]
fn the_program_knows_the_capital_of_france_and_what_was_said_before() -> Result<()> {
    let mut program = Command::new(support::example()?)
        .args(["--system", "You are a helpful assistant.", "--no-cache"])
        .args(["--max-tokens", "30", "--model"])
        .arg(support::gguf()?)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()?;
    let mut input = program.stdin.take().context("it was piped")?;
    input.write_all(b"The capital of France is\nWhich city did you name?\n")?;
    drop(input);
    let output = program.wait_with_output()?;
    ensure!(output.status.success(), "{}", output.status);
    let text = String::from_utf8(output.stdout)?;
    assert_eq!(
        text.lines().filter(|line| line.contains("Paris")).count(),
        2,
        "{text}"
    );
    Ok(())
}

#[test]
fn characters_that_are_spread_over_tokens_appear_whole() -> Result<()> {
    let tokenizer = tokenizer::from_gguf(&support::header()?)?;
    let text = "naïve 🙂 日本語 👩‍🚀 done";
    let tokens = tokenizer::encode(&tokenizer, text, false)?;
    let unfinished = |token: &u32| {
        let alone = tokenizer.decode(&[*token], true);
        alone.is_ok_and(|text| text.contains(char::REPLACEMENT_CHARACTER))
    };
    assert!(
        tokens.iter().any(unfinished),
        "some characters take several tokens"
    );
    let mut stream = tokenizer::Stream::new(&tokenizer);
    let mut shown = String::new();
    for token in tokens {
        let piece = stream.push(token)?;
        assert!(!piece.contains(char::REPLACEMENT_CHARACTER), "{piece:?}");
        shown.push_str(&piece);
    }
    shown.push_str(&stream.finish()?);
    assert_eq!(shown, text);
    Ok(())
}

#[test]
fn a_text_that_stops_inside_a_character_says_so_at_its_end() -> Result<()> {
    let tokenizer = tokenizer::from_gguf(&support::header()?)?;
    let mut tokens = tokenizer::encode(&tokenizer, "語", false)?;
    assert!(tokens.len() > 1);
    tokens.pop();
    let mut stream = tokenizer::Stream::new(&tokenizer);
    for token in tokens {
        assert_eq!(stream.push(token)?, "");
    }
    assert!(stream.finish()?.contains(char::REPLACEMENT_CHARACTER));
    Ok(())
}

#[test]
fn digits_are_tokens_of_their_own_and_no_space_is_put_before_a_text() -> Result<()> {
    let tokenizer = tokenizer::from_gguf(&support::header()?)?;
    let tokens = tokenizer::encode(&tokenizer, "2026", false)?;
    assert_eq!(tokens.len(), 4);
    let decoded = tokenizer
        .decode(&tokens, true)
        .map_err(anyhow::Error::msg)?;
    assert_eq!(decoded, "2026");
    Ok(())
}

#[test]
fn a_conversation_is_written_by_the_models_own_template() -> Result<()> {
    let from_header = Manners::from_gguf(&support::header()?)?;
    let folder = support::dense_folder()?;
    let from_files = Manners::from_files(|name| std::fs::read(folder.join(name)).ok())?;
    let expected = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
        <|im_start|>user\nHow many is 12 and 30?<|im_end|>\n\
        <|im_start|>assistant\n42<|im_end|>\n\
        <|im_start|>user\nSure?<|im_end|>\n\
        <|im_start|>assistant\n";
    for manners in [from_header, from_files] {
        let mut chat = Chat::new(None);
        chat.ask(&manners, "How many is 12 and 30?")?;
        chat.answer("42".into());
        let tokens = chat.ask(&manners, "Sure?")?;
        let text = manners.tokenizer.decode(&tokens, false);
        assert_eq!(text.map_err(anyhow::Error::msg)?, expected);
        let end = manners.tokenizer.token_to_id("<|im_end|>");
        assert_eq!(
            manners.stops.iter().copied().collect::<Vec<_>>(),
            Vec::from_iter(end)
        );
        assert_eq!(
            tokens.iter().filter(|token| Some(**token) == end).count(),
            4
        );
    }
    Ok(())
}
