#!/usr/bin/env bash
# A SLURM cluster of one node on this machine for the time of one command: tests/cluster/slurm.sh FOLDER COMMAND...
#
# Controller and node daemon run in a process and network namespace of their own, which ends with the command and takes
# whatever is left with it. There is no accounting and no authentication: for tests only. Needs root and `make ci-deps`.
set -euo pipefail

folder=$(realpath -m "$1")
shift
if [ -z "${KV_TEST_CLUSTER:-}" ]; then
    export KV_TEST_CLUSTER=1
    exec unshare --net --pid --fork --mount-proc --kill-child "$0" "$folder" "$@"
fi

# SLURM looks names up only where an address other than the loopback's is configured.
ip link set lo up
ip address add 192.0.2.7/32 dev lo

host=$(hostname -s)
mkdir -p "$folder/state" "$folder/spool"
export SLURM_CONF=$folder/slurm.conf
cat > "$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait=2
SchedulerParameters=batch_sched_delay=0,sched_min_interval=1000,sched_interval=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=test Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF

slurmctld -c
slurmd
for _ in $(seq 200); do
    if [ "$(timeout 2 sinfo --noheader --format=%T 2>/dev/null)" = idle ]; then
        "$@" && exit 0 || exit $?
    fi
    sleep 0.1
done
echo "the cluster did not come up:" >&2
cat "$folder"/*.log >&2
exit 1
