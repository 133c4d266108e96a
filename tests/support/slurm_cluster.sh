#!/bin/bash
# The daemons of a SLURM cluster: slurmctld on "head", slurmd on "node1", "node2" and so on. tests/support/slurm_cluster.py runs this as
# the first process of namespaces of its own (processes, mounts, network, host name), so nothing of it is seen outside, and all of
# it is gone once this script ends: when its standard input does.
#
#   slurm_cluster.sh FOLDER NODES      FOLDER of configuration, state and logs; it must be empty, and no other user may write above it
set -eu
folder=$1
numbers=$(seq "$2")
export SLURM_CONF=$folder/slurm.conf

mkdir -p "$folder"/{state,log,run,spool}
printf '%s\n' "127.0.0.1 localhost" "10.99.0.1 head" > "$folder/hosts"
for number in $numbers; do echo "10.99.0.1$number node$number"; done >> "$folder/hosts"
head -c 128 /dev/urandom > "$folder/munge.key"
chmod 400 "$folder/munge.key"
echo "CgroupPlugin=cgroup/v1" > "$folder/cgroup.conf"  # not used; looking for the version fails without /sys/fs/cgroup
cat > "$SLURM_CONF" <<END
ClusterName=hftune
SlurmctldHost=head(10.99.0.1)
SlurmUser=root
AuthType=auth/munge
# A requeued job waits until its credentials have expired: 120 seconds by default, 5 at least.
AuthInfo=socket=$folder/run/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmdPidFile=$folder/run/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
ReturnToService=2
SlurmdParameters=config_overrides
MailProg=/bin/true
MinJobAge=36000
SlurmdTimeout=5  # of silence until a node counts as lost; 300 by default
NodeName=node[1-$2] NodeAddr=10.99.0.1[1-$2] CPUs=4 RealMemory=8000
PartitionName=main Nodes=node[1-$2] Default=YES MaxTime=INFINITE State=UP
END

mount --bind "$folder/hosts" /etc/hosts
hostname head
ip link set lo up
ip link add name cluster type bridge
ip addr add 10.99.0.1/24 dev cluster
ip link set cluster up

munged --foreground --socket="$folder/run/munge.sock" --key-file="$folder/munge.key" \
    --pid-file="$folder/run/munged.pid" --seed-file="$folder/run/munge.seed" 2> "$folder/log/munged.log" &
until [[ -S $folder/run/munge.sock ]]; do
    kill -0 $!
    sleep 0.05
done
slurmctld -D 2> "$folder/log/slurmctld.log" &

for number in $numbers; do
    unshare --net --uts bash -c '
        hostname "$1"
        until ip link show eth0; do sleep 0.05; done &> /dev/null
        ip link set lo up
        ip addr add "$2/24" dev eth0
        ip link set eth0 up
        exec slurmd -D -N "$1"
    ' slurmd "node$number" "10.99.0.1$number" 2> "$folder/log/node$number.log" &
    node=$!
    until [[ $(readlink "/proc/$node/ns/net") != "$(readlink /proc/self/ns/net)" ]]; do sleep 0.05; done
    ip link add name "to$number" type veth peer name eth0 netns "$node"
    ip link set "to$number" master cluster up
done

cat > /dev/null
