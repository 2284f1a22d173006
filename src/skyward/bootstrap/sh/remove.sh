# End a node's agent and all it started, and delete the node's folder.
is_agent() { [ -n "$agent" ] && [ "$(start_of "$agent")" = "$began" ]; }

for base in $(each_base); do
    folder=$base/sky.$pool.$node
    is_mine "$folder" || continue
    agent= began=
    [ -f "$folder/agent.pid" ] && read -r agent began <"$folder/agent.pid"
    if is_agent; then
        # The agent's children lead process groups of their own. If it does not end them, they are
        # killed by number below.
        children=
        for stat in /proc/[0-9]*/stat; do
            read -r line 2>/dev/null <"$stat" || continue
            pid=${line%% *}
            set -- ${line##*) }
            if [ "$2" = "$agent" ]; then children="$children $pid"; fi
        done
        kill -TERM "$agent"
        # A stopped process gets a signal only once it is continued.
        kill -CONT "$agent"
        patience=50
        while is_agent && [ "$patience" -gt 0 ]; do
            patience=$((patience - 1))
            sleep 0.1 2>/dev/null || sleep 1
        done
        if is_agent; then
            for pid in $children; do kill -KILL "-$pid"; done
        fi
        kill -KILL "-$agent"
    fi 2>/dev/null
    rm -rf "$folder"
done
tell removed yes
