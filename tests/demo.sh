# The main job, start to end, on a small synthetic checkpoint. `make demo` runs it.
set -eu
here=build/demo
rm -rf "$here"
mkdir -p "$here"

step() {
    printf '\n$ %s\n' "$*"
    "$@"
}

step dsv2mk synth "$here/snapshot" --geometry tiny
step dsv2mk plan "$here/snapshot" --tp 2
step dsv2mk build "$here/snapshot" --tp 2 --out "$here/artifact"
step dsv2mk verify "$here/artifact"
step dsv2mk inspect "$here/artifact" --rank 0
step dsv2mk generate "$here/artifact" --backend reference --prompt "Hello" --max-new 16 --ignore-eos
step dsv2mk cubin --artifact "$here/artifact" --arch sm_100a

cat <<END

The checkpoint is in $here/snapshot, the artifact in $here/artifact. Next, with .venv/bin in PATH:
  dsv2mk generate $here/artifact --prompt "Hello" --max-new 16 --json
  dsv2mk cubin --geometry deepseek-v2 --tp 8 --arch sm_100a,sm_90a
  make artifacts SNAPSHOT=/path/to/DeepSeek-V2 TP=8 OUT=/path/to/artifact
END
