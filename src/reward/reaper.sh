# Waits until whoever started it closes the other end of its standard input, or dies. Then it kills every process that carries
# the mark $1 in its environment, until there is none (or it cannot be killed), and removes the folder $2.
trap '' HUP INT TERM USR1
read -r never
pass=0
while found=$(grep -lsF -- "$1" /proc/[0-9]*/environ); [ -n "$found" ] && [ $pass -lt 100 ]; do
    for file in $found; do
        file=${file#/proc/}
        kill -9 "${file%/environ}" 2>/dev/null
    done
    pass=$((pass + 1))
done
[ -z "$2" ] || rm -rf -- "$2"
