/* The few locks of the whole process: each guards a short list that all contexts share. */
#ifndef ORCH_LOCK_H
#define ORCH_LOCK_H

typedef enum orch_lock_name {
    ORCH_LOCK_DEVICES, /* device.c: which are open, and who has them */
    ORCH_LOCK_LOSING,  /* device.c: why a device was lost */
    ORCH_LOCK_BUFFERS, /* memory_counts.c: those that live */
    ORCH_LOCK_ROUTES,  /* route.c: files that were loaded */
    ORCH_LOCKS
} orch_lock_name;

void orch_lock(orch_lock_name name);
void orch_unlock(orch_lock_name name);

#endif
