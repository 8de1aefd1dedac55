#!/bin/bash
# Packs a directory with a training script, uploads it, and creates or updates the stack.
#
#   examples/ec2/deploy.sh STACK DIRECTORY CODE_BUCKET VPC HEAD_SUBNET SUBNET[,SUBNET...] [Parameter=Value...]
#
# An update that would replace the head is refused: etcd's data and the CA are on its disk.
set -euo pipefail

if [ $# -lt 6 ]; then
  sed -n '2,6p' "$0" >&2
  exit 2
fi
stack=$1 directory=$2 bucket=$3 vpc=$4 head_subnet=$5 subnets=$6
shift 6
here=$(cd "$(dirname "$0")" && pwd)
image=/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id

[ -d "$directory" ] || { echo "$directory is not a directory with a training script" >&2; exit 2; }
archive=$(mktemp --suffix=.tar.gz)
trap 'rm -f "$archive"' EXIT
tar -czf "$archive" -C "$directory" .
digest=$(sha256sum "$archive" | cut -c1-16)
key="adaptdl/$stack/$digest.tar.gz"
aws s3 cp --only-show-errors "$archive" "s3://$bucket/$key"

# The head keeps the image and the package that it was made from: they are chosen when there is no stack yet.
chosen=("$@")
awaited="stack-update-complete"
if ! aws cloudformation describe-stacks --stack-name "$stack" >/dev/null 2>&1; then
  awaited="stack-create-complete"
  case " $* " in
    *" HeadImage="*) ;;
    *)
      chosen+=("HeadImage=$(aws ssm get-parameter --name "$image" --query Parameter.Value --output text)")
      ;;
  esac
  case " $* " in
    *" Package="*) ;;
    *)
      package=$(mktemp --suffix=.tar.gz)
      trap 'rm -f "$archive" "$package"' EXIT
      adaptdl cloud pack "$package"
      key_of_package="adaptdl/$stack/package-$(sha256sum "$package" | cut -d' ' -f1).tar.gz"
      aws s3 cp --only-show-errors "$package" "s3://$bucket/$key_of_package"
      chosen+=("Package=s3://$bucket/$key_of_package")
      ;;
  esac
fi

said=$(aws cloudformation deploy \
  --stack-name "$stack" \
  --template-file "$here/template.yaml" \
  --capabilities CAPABILITY_IAM \
  --no-execute-changeset --no-fail-on-empty-changeset \
  --tags "adaptdl-elastic:stack=$stack" \
  --parameter-overrides \
  "Code=s3://$bucket/$key" "CodeBucket=$bucket" "Vpc=$vpc" "HeadSubnet=$head_subnet" "Subnets=$subnets" \
  ${chosen[@]+"${chosen[@]}"})
changes=$(grep -o 'arn:[^ ]*:changeSet/[^ ]*' <<<"$said" || true)
if [ -z "$changes" ]; then
  echo "$said"
  exit 0
fi
head=$(aws cloudformation describe-change-set --change-set-name "$changes" --output text --query \
  "Changes[].ResourceChange | [?LogicalResourceId=='Head' && Action=='Modify' && Replacement!='False'].LogicalResourceId")
if [ -n "$head" ]; then
  aws cloudformation delete-change-set --change-set-name "$changes"
  echo "$stack: not updated. This would replace the head, and etcd's data and the CA are on its disk." >&2
  echo "Leave out what changes it (HeadImage, Package, Job, prices, limits), or delete the stack and create it anew." >&2
  exit 3
fi
aws cloudformation execute-change-set --change-set-name "$changes"
aws cloudformation wait "$awaited" --stack-name "$stack"
aws cloudformation describe-stacks --stack-name "$stack" --output text \
  --query "Stacks[0].Outputs[].[OutputKey, OutputValue]"
