#!/usr/bin/env bash
# Builds the image and runs it on a Debian machine without a Docker engine: docker/build.sh [TORCH]
#
# TORCH is the Dockerfile's argument, none if it is left out. torch always comes from the index that this machine is configured for.
# The image for GPUs is also started without one, and has to refuse in one sentence.
#
# buildah builds the Dockerfile in chroot isolation. The base image is not pulled; debootstrap makes a substitute under the same
# tag, without its digest: Debian bookworm with Debian's Python of the same minor version. The script then runs the image's entry point as its
# user and as process 1, in the image's root file system and environment, streams an answer from it, and ends it with SIGTERM.
#
# The script needs root, and installs missing tools. Packages come from the sources that this machine is configured for: debootstrap
# uses apt's mirror, and pip inside the build uses this machine's pip settings. All files are below OUTRIDER_IMAGE_FOLDER, about
# 6 GB; a second run reuses the base.
set -euo pipefail
shopt -s nullglob

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
torch=${1:-none}
folder=${OUTRIDER_IMAGE_FOLDER:-/var/tmp/outrider-image}
log=$folder/build.log
outer=""     # process id of the running server's parent
container="" # the container that the image runs in
export BUILDAH_ISOLATION=chroot PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '%s\n' "$*"; }
fail() { printf 'build.sh: %s\n' "$*" >&2; exit 1; }
now() { date +%s.%N; }
since() { awk -v began="$1" -v ended="$(now)" 'BEGIN { printf "%.1f s", ended - began }'; }
# The vfs driver copies instead of mounting: slower, but it also works inside a container.
images() { buildah --storage-driver vfs --root "$folder/storage" --runroot "$folder/run" "$@"; }
logged() { "$@" >>"$log" 2>&1 || { tail -n 30 "$log" >&2; fail "this command failed: $1 ${2:-} ... (see $log)"; }; }

install_tools() {
    local missing=() tool
    for tool in buildah:buildah curl:curl debootstrap:debootstrap pgrep:procps pip3:python3-pip; do
        command -v "${tool%:*}" >/dev/null || missing+=("${tool#*:}")
    done
    [ ${#missing[@]} = 0 ] && return
    command -v apt-get >/dev/null || fail "install ${missing[*]} first."
    logged apt-get update
    logged apt-get install -y --no-install-recommends "${missing[@]}"
}

# The mirror from which apt on this machine installs Debian bookworm; empty if apt uses another release.
mirror() {
    # shellcheck disable=SC2016
    apt-get indextargets --format '$(CODENAME) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' 2>/dev/null |
        awk '$1 == "bookworm" && $2 == "main" { print $3; exit }'
}

make_base() {
    local name=$1 root=$folder/base scratch address
    images image exists "$name" 2>/dev/null && { say "base: $name, reused"; return; }
    local began; began=$(now)
    rm -rf "$root"
    address=$(mirror)
    logged debootstrap --variant=minbase --include=ca-certificates,python3,python3-pip,python3-venv \
        bookworm "$root" ${address:+"$address"}
    ln -s /usr/bin/python3 "$root/usr/local/bin/python"
    rm -rf "$root"/var/cache/apt/archives/*.deb
    scratch=$(images from scratch)
    logged images add "$scratch" "$root" /
    logged images config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin --cmd python "$scratch"
    logged images commit --rm "$scratch" "$name"
    rm -rf "$root"
    say "base: $name, made with debootstrap in $(since "$began")"
}

# Prints --volume arguments, one per line, that give pip inside the build this machine's pip settings and the files they name.
pip_volumes() {
    python3 -m pip config list 2>/dev/null | python3 -c '
import ast, pathlib, sys
settings, paths = {}, {}
for line in sys.stdin:
    name, _, value = line.strip().partition("=")
    value = str(ast.literal_eval(value))
    settings[name.split(".", 1)[1]] = value  # the environment comes last and overrides the rest
    for word in value.split():
        path = pathlib.Path(word.removeprefix("file://"))
        if path.is_absolute() and path.exists():
            top = path.parent if path.is_dir() and word.startswith("file://") else path  # an index may link to its siblings
            paths[str(top)] = None
written = pathlib.Path(sys.argv[1])
written.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
print(f"--volume={written}:/etc/pip.conf:ro")
for path in paths:
    print(f"--volume={path}:{path}:ro")
' "$folder/pip.conf"
}

build() {
    local began volumes; began=$(now)
    mapfile -t volumes < <(pip_volumes)
    sed 's/@sha256:[0-9a-f]*//' "$repository/Dockerfile" >"$folder/Dockerfile"
    logged images build --file "$folder/Dockerfile" --format docker --pull-never --build-arg "TORCH=$torch" --build-arg TORCH_INDEX= "${volumes[@]}" \
        --tag outrider "$repository"
    say "image: built in $(since "$began")"
}

# Prints one part of the image's configuration as NUL-separated words: env, start, health, user or folder.
configured() {
    images inspect --type image outrider | python3 -c '
import json, sys
config = json.load(sys.stdin)["Docker"]["config"]
words = {"env": config["Env"], "start": config["Entrypoint"] + config["Cmd"], "health": config["Healthcheck"]["Test"][1:]}
words["user"], words["folder"] = config["User"].split(":"), [config["WorkingDir"]]
sys.stdout.write("".join(word + "\0" for word in words[sys.argv[1]]))
' "$1"
}

# Runs a command in the image's root, as its user, in its folder and environment, as process 1 of a new process namespace.
inside() {
    exec unshare --mount --pid --fork --root="$root" --mount-proc \
        --setgid="${user[1]}" --setuid="${user[0]}" --wd="${workdir[0]}" env -i "${environment[@]}" "$@"
}

status() { curl --silent --output /dev/null --write-out '%{http_code}' --max-time 5 "$@" || true; }

# Starts the server and waits until it is ready. Sets `server` to the process id of its process 1 on this machine.
start() {
    local began listening=""; began=$(now)
    (inside "${start_command[@]}") >"$folder/server.log" 2>&1 &
    outer=$!
    until [ "$(status "$url/ready")" = 200 ]; do
        kill -0 "$outer" 2>/dev/null || { cat "$folder/server.log" >&2; fail "the server ended before it was ready."; }
        [ -z "$listening" ] && [ "$(status "$url/health")" = 200 ] && listening=$(since "$began")
        sleep 0.1
    done
    server=$(pgrep -P "$outer")
    say "$1: /health after $listening, /ready after $(since "$began")"
}

stop() {
    local began code=0; began=$(now)
    kill -TERM "$server"
    for _ in $(seq 300); do
        [ -d "/proc/$server" ] || break
        sleep 0.1
    done
    [ -d "/proc/$server" ] && fail "the server did not end within 30 s of SIGTERM."
    wait "$outer" || code=$?
    outer=""
    say "SIGTERM: ended after $(since "$began") with exit code $code"
    [ "$(status "$url/health")" = 000 ] || fail "a process still answers at $url."
}

clean_up() {
    [ -z "$outer" ] || pkill -KILL -P "$outer" || true # process 1, which ends all of its processes
    umount --recursive --lazy "$root/dev"
    images rm "$1" >/dev/null
}

try_image() {
    local port key refusal code=0
    mapfile -d '' environment < <(configured env)
    mapfile -d '' start_command < <(configured start)
    mapfile -d '' health_command < <(configured health)
    mapfile -d '' user < <(configured user)
    mapfile -d '' workdir < <(configured folder)
    container=$(images from --pull-never outrider)
    root=$(images mount "$container")
    mount --rbind --make-rslave /dev "$root/dev"
    cp /etc/resolv.conf "$root/etc/resolv.conf"
    trap 'clean_up "$container"' EXIT
    say "size: $(du --summarize --one-file-system --block-size=1M "$root" | cut -f1) MB unpacked, of which the environment" \
        "$(du --summarize --block-size=1M "$root/opt/outrider" | cut -f1) MB"
    say "entry point: ${start_command[*]} (user ${user[*]}, folder ${workdir[*]})"

    refusal=$( (inside "${start_command[@]}") 2>&1) || code=$?
    say "without keys: exit code $code, \"$refusal\""
    [ "$code" = 2 ] || fail "without keys, the server should have refused to start."
    if [ "$torch" != none ] && [ "$torch" != cpu ]; then
        say "compiler for launchers of kernels: $( (inside gcc --version) | head -n 1)"
        code=0
        refusal=$( (inside outrider serve --auth.open true --model.device cuda) 2>&1) || code=$?
        say "on a GPU, without one: exit code $code"
        printf '%s\n' "$refusal" | sed 's/^/    /'
        [ "$code" != 0 ] || fail "without a GPU, the server should have refused to start on one."
    fi

    port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    key=sk-$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
    url=http://127.0.0.1:$port
    environment+=("OUTRIDER_SERVER__PORT=$port" "OUTRIDER_AUTH__KEYS__ALICE=$key")
    start "first start"
    say "process: $(awk '/^(Name|Uid|NSpid):/ { printf "%s %s %s; ", $1, $2, $NF }' "/proc/$server/status")"
    (inside "${health_command[@]}") || fail "the image's health check failed."
    say "health check: passed"
    code=$(status "$url/v1/models")
    say "request without a key: $code"
    [ "$code" = 401 ] || fail "a request without a key should have been refused."
    say "streamed answer:"
    OUTRIDER_KEY=$key python3 "$repository/docker/stream.py" "$url" | sed 's/^/    /'
    stop
    start "second start"
    stop
}

[ "$(id -u)" = 0 ] || fail "run this as root: it mounts file systems and changes users."
mkdir -p "$folder"
: >"$log"
install_tools
base=$(sed -n 's/^FROM \([^ ]*:[^ @]*\)@.*/\1/p' "$repository/Dockerfile" | head -n 1)
say "commit $(git -C "$repository" rev-parse --short HEAD 2>/dev/null || echo unknown), $(buildah --version | cut -d' ' -f1-3), $(nproc) cores"
make_base "$base"
build
try_image
