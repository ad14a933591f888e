//! Names: of tensors that are not there, and of what travels beside the tensors.

use candle_core::{DType, Error};

use super::{bare, noise};
use crate::place::Place;
use crate::stand_in::Model;

pub(crate) fn a_missing_name_is_candles_own_error_and_names_the_nearest_under_every_prefix(
    place: &Place,
) {
    let tails = [
        "embed_tokens.weight",
        "layers.0.self_attn.q_proj.weight",
        "norm.weight",
    ];
    let prefixes = [
        "model.language_model.",
        "language_model.model.",
        "",
        "deberta.",
        "base_model.model.model.",
    ];
    for prefix in prefixes {
        let mut model = Model::new("m");
        for tail in tails {
            model = model.floats(&format!("{prefix}{tail}"), &[1], &[0.]);
        }
        let daemon = place.serve(model);
        let vb = place.attach(&daemon).var_builder(DType::F32);
        for tail in tails {
            let asked = format!("model.{tail}");
            assert!(!vb.contains_tensor(&asked));
            let error = vb.get(1, &asked).unwrap_err();
            let text = error.to_string();
            let Error::Context { inner, .. } = error else {
                panic!("{error:?}")
            };
            assert!(matches!(bare(*inner), Error::CannotFindTensor { path } if path == asked));
            let nearest = format!("nearest: `{prefix}{tail}`");
            assert!(text.contains(&nearest), "{prefix:?}: {text}");
            assert!(text.contains("only the prefix differs"), "{text}");
        }
    }
}

pub(crate) fn a_misspelt_name_finds_its_neighbours_and_a_strange_one_finds_none(place: &Place) {
    let mut model = Model::new("m");
    for layer in 0..300 {
        for part in ["q_proj", "k_proj", "v_proj"] {
            let name = format!("model.layers.{layer}.self_attn.{part}.weight");
            model = model.floats(&name, &[1], &[0.]);
        }
    }
    let daemon = place.serve(model);
    let vb = place.attach(&daemon).var_builder(DType::F32);
    for (asked, nearest) in [
        (
            "model.layers.217.self_attn.k_porj.weight",
            "model.layers.217.self_attn.k_proj.weight",
        ),
        (
            "model.layers.217.self_attn.k_proj.weigth",
            "model.layers.217.self_attn.k_proj.weight",
        ),
        (
            "layers.299.self_attn.v_proj.weight",
            "model.layers.299.self_attn.v_proj.weight",
        ),
    ] {
        let text = vb.get(1, asked).unwrap_err().to_string();
        assert!(text.contains(&format!("nearest: `{nearest}`")), "{text}");
    }
    for asked in ["", "ß", "x.y", &"é".repeat(5000)] {
        let text = vb.get(1, asked).unwrap_err().to_string();
        assert!(text.contains("nor one with a name like it"), "{text}");
    }
}

pub(crate) fn a_missing_head_is_not_invented_and_the_error_mentions_the_tie(place: &Place) {
    for (held, asked) in [
        ("model.embed_tokens.weight", "lm_head.weight"),
        ("token_embd.weight", "output.weight"),
    ] {
        let daemon = place.serve(Model::new("m").floats(held, &[1], &[0.]));
        let vb = place.attach(&daemon).var_builder(DType::F32);
        assert!(!vb.contains_tensor(asked));
        let text = vb.get(1, asked).unwrap_err().to_string();
        assert!(
            text.contains("tie_word_embeddings") && text.contains(&format!("`{held}`")),
            "{text}"
        );
    }
}

pub(crate) fn small_files_and_attributes_come_back_byte_for_byte(place: &Place) {
    let mut model = Model::new("m").floats("a", &[1], &[1.]);
    let config = b"\xef\xbb\xbf{\"x\": Infinity,\r\n}".to_vec();
    model.files = vec![
        ("tokenizer/t.json".into(), noise(100_000, 5)),
        ("config.json".into(), config.clone()),
        ("empty".into(), vec![]),
    ];
    model.attributes = vec![("format".into(), "pt".into())];
    let daemon = place.serve(model);
    let cache = place.attach(&daemon);
    assert_eq!(cache.file("config.json"), Some(&config[..]));
    assert_eq!(cache.file("tokenizer/t.json"), Some(&noise(100_000, 5)[..]));
    assert_eq!(cache.file("empty"), Some(&[][..]));
    assert_eq!(cache.file("absent"), None);
    let names: Vec<_> = cache.files().collect();
    assert_eq!(names, ["config.json", "empty", "tokenizer/t.json"]);
    assert_eq!(cache.attribute("format"), Some("pt"));
    assert_eq!(cache.attribute("absent"), None);
}
