#!/bin/bash
# Packs a directory with a training script, uploads it, and creates or updates the stack.
#
#   examples/ec2/deploy.sh STACK DIRECTORY CODE_BUCKET VPC HEAD_SUBNET SUBNET[,SUBNET...] [Parameter=Value...]
set -euo pipefail

if [ $# -lt 6 ]; then
  sed -n '2,4p' "$0" >&2
  exit 2
fi
stack=$1 directory=$2 bucket=$3 vpc=$4 head_subnet=$5 subnets=$6
shift 6
here=$(cd "$(dirname "$0")" && pwd)

[ -d "$directory" ] || { echo "$directory is not a directory with a training script" >&2; exit 2; }
archive=$(mktemp --suffix=.tar.gz)
trap 'rm -f "$archive"' EXIT
tar -czf "$archive" -C "$directory" .
digest=$(sha256sum "$archive" | cut -c1-16)
key="adaptdl/$stack/$digest.tar.gz"
aws s3 cp --only-show-errors "$archive" "s3://$bucket/$key"

aws cloudformation deploy \
  --stack-name "$stack" \
  --template-file "$here/template.yaml" \
  --capabilities CAPABILITY_IAM \
  --parameter-overrides \
  "Code=s3://$bucket/$key" "CodeBucket=$bucket" "Vpc=$vpc" "HeadSubnet=$head_subnet" "Subnets=$subnets" "$@"
