# List the NVIDIA cards of the machine: the memory in MiB ("?" where nobody measured it), the model.
gpus=/proc/driver/nvidia/gpus
devices=/dev/nvidia
isolated=
for device in "$devices"[0-9]*; do
    if [ -e "$device" ]; then isolated=yes; fi
done
cards= unmeasured=
for card in "$gpus"/*/information; do
    [ -r "$card" ] || continue
    model=NVIDIA number=
    while read -r name first rest; do
        case $name,$first in
            Model:,*) model=$first${rest:+ $rest} ;;
            Device,Minor:) number=$rest ;;
        esac
    done <"$card"
    # A container sees all cards of its machine in /proc, and has the devices of some.
    if [ -n "$isolated" ] && [ -n "$number" ] && [ ! -e "$devices$number" ]; then continue; fi
    cards="$cards?, $model
"
    case $model in
        *[0-9]G*) ;;
        *) unmeasured=yes ;;
    esac
done
# nvidia-smi took 0.03 s on an H200; without NVIDIA's persistence daemon it wakes every card first.
if [ -n "$unmeasured" ] && have nvidia-smi &&
    measured=$(nvidia-smi --query-gpu=memory.total,name --format=csv,noheader,nounits 2>/dev/null); then
    cards=$measured
fi
# Where a scheduler gave the node some of the machine's cards, the others are somebody else's.
room=-1
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    room=$(IFS=,; set -- $CUDA_VISIBLE_DEVICES; printf '%s' "$#")
fi
printf '%s\n' "$cards" | while read -r card; do
    if [ -n "$card" ] && [ "$room" != 0 ]; then
        room=$((room - 1))
        tell card "$card"
    fi
done
