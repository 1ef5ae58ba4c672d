#!/bin/sh
# A compiler's launcher that fails where the assembler of CUDA serializes wgmma products (C7510 and its like). It only notes
# that, and what it compiles is right, at half the speed.
said=$("$@" 2>&1)
result=$?
[ -z "$said" ] || printf '%s\n' "$said" >&2
case $said in
*"(C75"[0-9][0-9]")"*) ;;
*) exit $result ;;
esac
echo "products are serialized in a kernel above: give it fewer registers to hold at once" >&2
while [ $# -gt 1 ]; do  # what was made counts as made otherwise
  [ "$1" != -o ] || rm -f "$2"
  shift
done
exit 1
