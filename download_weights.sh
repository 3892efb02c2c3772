#!/usr/bin/env bash
# Downloads checkpoints in the layout that post_train.py reads. Run it again to resume an interrupted download:
#   bash download_weights.sh --version 480p_t2v --with quoted_text,reward --out ./ckpts
#
#   --version NAMES   transformers, comma-separated or repeated (480p_t2v): 480p_i2v, 720p_t2v, 720p_i2v, ..._distilled;
#                     super-resolution: 720p_sr_distilled (for 480p), 1080p_sr_distilled (for 720p);
#                     or one version of Wan: wan2.1_t2v_1.3b, wan2.1_t2v_14b, wan2.2_ti2v_5b, wan2.2_t2v_a14b,
#                     wan2.2_i2v_a14b, wan2.1_i2v_14b_480p, wan2.1_i2v_14b_720p, wan2.1_flf2v_14b_720p, and its
#                     students of few steps: wan2.1_t2v_1.3b_anyflow, wan2.1_t2v_14b_anyflow, wan2.2_ti2v_5b_fastwan,
#                     wan2.2_t2v_a14b_4step, wan2.2_i2v_a14b_4step (the latter with their LoRAs)
#   --with PARTS      parts besides transformer, VAE and language model (quoted_text,reward; for Wan: reward), any of
#                     i2v (SigLIP; gated, needs HF_TOKEN), quoted_text (glyph encoder, from ModelScope),
#                     reward (VideoAlign), hpsv3, metrics (CLIP, PickScore); or "none"
#   --source NAME     huggingface or modelscope (huggingface); HF_ENDPOINT sets a mirror of Hugging Face
#   --out FOLDER      target folder (./ckpts; for Wan: ./ckpts/<version>)
#   --dry_run         only print the commands
# Licenses, sizes and unverified facts: checkpoints-download.md
set -euo pipefail
repository="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)"
# The environment of scripts/setup.sh contains `hf`.
PATH="$repository/.venv/bin:$PATH"

fail() {
    echo "download_weights.sh: $1" >&2
    exit 2
}

versions=() parts= source=huggingface out= dry_run=false
while [ $# -gt 0 ]; do
    flag="${1%%=*}"
    case "$flag" in
        --dry_run) dry_run=true; shift; continue ;;
        -h | --help) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        --version | --with | --source | --out) ;;
        *) fail "unknown argument $1; see --help" ;;
    esac
    if [ "$flag" != "$1" ]; then value="${1#*=}"; shift
    elif [ $# -gt 1 ]; then value="$2"; shift 2
    else fail "$flag needs a value"
    fi
    case "$value" in "" | --*) fail "$flag needs a value" ;; esac
    case "$flag" in
        --version) IFS=, read -r -a more <<< "$value"; versions+=("${more[@]}") ;;
        --with) parts="$value" ;;
        --source) source="$value" ;;
        --out) out="$value" ;;
    esac
done
[ ${#versions[@]} -gt 0 ] || versions=(480p_t2v)
case "${versions[*]}" in wan*) parts="${parts:-reward}" ;; *) parts="${parts:-quoted_text,reward}" ;; esac
case "$source" in huggingface | modelscope) ;; *) fail "--source must be huggingface or modelscope, got $source" ;; esac

wan= # repository of the Wan version, if one is requested
for version in "${versions[@]}"; do
    case "$version" in
        wan2.1_t2v_1.3b) wan=Wan-AI/Wan2.1-T2V-1.3B-Diffusers ;;
        wan2.1_t2v_14b) wan=Wan-AI/Wan2.1-T2V-14B-Diffusers ;;
        wan2.2_ti2v_5b) wan=Wan-AI/Wan2.2-TI2V-5B-Diffusers ;;
        wan2.1_t2v_1.3b_anyflow) wan=nvidia/AnyFlow-Wan2.1-T2V-1.3B-Diffusers ;;
        wan2.1_t2v_14b_anyflow) wan=nvidia/AnyFlow-Wan2.1-T2V-14B-Diffusers ;;
        wan2.2_ti2v_5b_fastwan) wan=FastVideo/FastWan2.2-TI2V-5B-FullAttn-Diffusers ;;
        wan2.2_t2v_a14b | wan2.2_t2v_a14b_4step) wan=Wan-AI/Wan2.2-T2V-A14B-Diffusers ;;
        wan2.2_i2v_a14b | wan2.2_i2v_a14b_4step) wan=Wan-AI/Wan2.2-I2V-A14B-Diffusers ;;
        wan2.1_i2v_14b_480p) wan=Wan-AI/Wan2.1-I2V-14B-480P-Diffusers ;;
        wan2.1_i2v_14b_720p) wan=Wan-AI/Wan2.1-I2V-14B-720P-Diffusers ;;
        wan2.1_flf2v_14b_720p) wan=Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers ;;
        480p_t2v | 480p_i2v | 720p_t2v | 720p_i2v | 480p_t2v_distilled | 480p_i2v_distilled) ;;
        720p_i2v_distilled | 480p_i2v_step_distilled | 480p_t2v_step_distilled) ;;
        720p_t2v_distilled) echo "download_weights.sh: $version was announced, and may not be on the hub yet" >&2 ;;
        720p_sr_distilled | 1080p_sr_distilled) ;;
        *_sparse) fail "version $version is not supported: no sparse attention" ;;
        *) fail "unknown version $version; see --help" ;;
    esac
    if [ -n "$wan" ] && [ ${#versions[@]} -gt 1 ]; then
        fail "download one version at a time: each version of Wan has its own folder, in another layout"
    fi
    case "$version" in wan*) ;; *_i2v*) case ",$parts," in *,i2v,*) ;; *) parts="$parts,i2v" ;; esac ;; esac
done
out="${out:-./ckpts${wan:+/${versions[0]%_4step}}}"
IFS=, read -r -a chosen <<< "$parts"
for part in "${chosen[@]}"; do
    case "$part" in i2v | quoted_text | reward | hpsv3 | metrics | none) ;; *) fail "--with: unknown part $part; see --help" ;; esac
    case "$wan,$part" in
        ,*) ;;
        *,i2v | *,quoted_text) fail "--with $part is only for HunyuanVideo-1.5: Wan has no such part" ;;
    esac
done
includes() { case ",$parts," in *,"$1",*) return 0 ;; *) return 1 ;; esac; }

hub=hf
if ! command -v hf > /dev/null && command -v huggingface-cli > /dev/null; then hub=huggingface-cli; fi

# Check the requirements before the first gigabyte is downloaded.
if ! $dry_run; then
    if [ "$source" = huggingface ] || includes quoted_text || includes reward || includes hpsv3 ||
        includes metrics; then
        command -v "$hub" > /dev/null ||
            fail "hf and huggingface-cli are missing; run: pip install huggingface_hub (or: source scripts/setup.sh)"
    fi
    if { [ "$source" = modelscope ] || includes quoted_text; } && ! command -v modelscope > /dev/null; then
        [ "$source" = modelscope ] || why=" (the glyph encoder of quoted_text is only on ModelScope)"
        fail "the program modelscope is missing${why:-}. Install it: source scripts/setup.sh && pip install modelscope
${why:+  or leave out the support of quoted text in prompts: --with reward}"
    fi
    if includes i2v && [ "$source" = huggingface ] && [ -z "${HF_TOKEN:-}" ] &&
        [ ! -f "${HF_HOME:-$HOME/.cache/huggingface}/token" ]; then
        fail "SigLIP for i2v is in a gated repository: accept the license on
  https://huggingface.co/black-forest-labs/FLUX.1-Redux-dev, then set HF_TOKEN or run: hf auth login"
    fi
fi

run() {
    printf '%q ' "$@" | sed 's/ $//'
    echo
    $dry_run || "$@" || {
        local code=$?
        echo "download_weights.sh: the download failed (is there a network?);" \
            "run the same command again to resume it" >&2
        exit "$code"
    }
}

from_huggingface() { # repository, folder in --out, then files or --include PATTERN
    local repository="$1" folder="$2"
    shift 2
    run "$hub" download "$repository" "$@" --local-dir "$out${folder:+/$folder}"
}

from_modelscope() {
    local repository="$1" folder="$2"
    shift 2
    run modelscope download --model "$repository" "$@" --local_dir "$out${folder:+/$folder}"
}

from_either() { # repository on Hugging Face, repository on ModelScope, then as for from_huggingface
    local huggingface="$1" modelscope="$2"
    shift 2
    if [ "$source" = modelscope ]; then from_modelscope "$modelscope" "$@"; else from_huggingface "$huggingface" "$@"; fi
}

hunyuan=(tencent/HunyuanVideo-1.5 Tencent-Hunyuan/HunyuanVideo-1.5)
clip_files=(config.json model.safetensors preprocessor_config.json tokenizer.json vocab.json merges.txt
    tokenizer_config.json special_tokens_map.json)

if [ -n "$wan" ]; then
    from_either "$wan" "$wan" "" model_index.json scheduler/scheduler_config.json
    for part in vae tokenizer text_encoder transformer; do
        from_either "$wan" "$wan" "" --include "$part/*"
    done
    case "${versions[0]}" in
        wan2.1_i2v_* | wan2.1_flf2v_*) for part in image_encoder image_processor; do from_either "$wan" "$wan" "" --include "$part/*"; done ;;
    esac
    case "${versions[0]}" in *_a14b*) from_either "$wan" "$wan" "" --include "transformer_2/*" ;; esac
    lora= # of the students of 4 steps, one file per expert
    case "${versions[0]}" in
        wan2.2_t2v_a14b_4step) lora=Wan2.2-T2V-A14B-4steps-lora-rank64-Seko-V1.1 ;;
        wan2.2_i2v_a14b_4step) lora=Wan2.2-I2V-A14B-4steps-lora-rank64-Seko-V1 ;;
    esac
    if [ -n "$lora" ]; then
        from_either lightx2v/Wan2.2-Lightning lightx2v/Wan2.2-Lightning "" --include "$lora/*"
    fi
else
    from_either "${hunyuan[@]}" "" --include "scheduler/*"
    from_either "${hunyuan[@]}" "" --include "vae/*"
    from_either Qwen/Qwen2.5-VL-7B-Instruct Qwen/Qwen2.5-VL-7B-Instruct text_encoder/llm
fi
if includes quoted_text; then
    from_huggingface google/byt5-small text_encoder/byt5-small config.json tokenizer_config.json special_tokens_map.json
    from_modelscope AI-ModelScope/Glyph-SDXL-v2 text_encoder/Glyph-SDXL-v2
fi
if includes i2v; then
    from_either black-forest-labs/FLUX.1-Redux-dev AI-ModelScope/FLUX.1-Redux-dev vision_encoder/siglip \
        image_encoder/config.json image_encoder/model.safetensors feature_extractor/preprocessor_config.json
fi
if includes reward; then from_huggingface KlingTeam/VideoReward VideoReward; fi
if includes hpsv3; then
    from_huggingface MizzenAI/HPSv3 HPSv3 HPSv3.safetensors
    from_huggingface Qwen/Qwen2-VL-7B-Instruct HPSv3 config.json tokenizer.json tokenizer_config.json vocab.json merges.txt
fi
if includes metrics; then
    from_huggingface openai/clip-vit-large-patch14 clip/clip-vit-large-patch14 "${clip_files[@]}"
    from_huggingface yuvalkirstain/PickScore_v1 clip/PickScore_v1 "${clip_files[@]}"
fi
for version in "${versions[@]}"; do
    if [ "$version" = 480p_t2v_step_distilled ]; then
        # A single file of LightX2V, which has the architecture of 480p_t2v.
        folder="transformer/$version"
        weights=hy1.5_t2v_480p_lightx2v_4step.safetensors
        from_either lightx2v/Hy1.5-Distill-Models lightx2v/Hy1.5-Distill-Models "$folder" "$weights"
        from_either "${hunyuan[@]}" "$folder" transformer/480p_t2v/config.json
        run cp "$out/$folder/transformer/480p_t2v/config.json" "$out/$folder/config.json"
        run ln -sf "$weights" "$out/$folder/diffusion_pytorch_model.safetensors"
    elif [ -z "$wan" ]; then
        from_either "${hunyuan[@]}" "" --include "transformer/$version/*"
    fi
    case "$version" in *_sr_distilled) from_either "${hunyuan[@]}" "" --include "upsampler/$version/*" ;; esac
done

if ! $dry_run; then
    echo "download_weights.sh: done. This lists what a run still lacks, such as files that were cut:" >&2
    echo "  python post_train.py --config FILE.yaml --pretrained_model_root $out --print_config" >&2
fi
