/* Another thread may hold a lock at a fork, and is not in the child: all are new there. Nothing is
 * locked before the fork, since a driver may fork while we open it: what is changed under a lock
 * must do no harm when it is found half done. */
#include "core/lock.h"

#include <pthread.h>

static pthread_mutex_t locks[ORCH_LOCKS] = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER,
                                            PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER};

_Static_assert(ORCH_LOCKS == 4, "one initializer for each");

static void after_fork_in_child(void)
{
    for (int i = 0; i < ORCH_LOCKS; i++) {
        pthread_mutex_init(&locks[i], NULL);
    }
}

__attribute__((constructor)) static void register_fork_handler(void)
{
    pthread_atfork(NULL, NULL, after_fork_in_child);
}

void orch_lock(orch_lock_name name)
{
    pthread_mutex_lock(&locks[name]);
}

void orch_unlock(orch_lock_name name)
{
    pthread_mutex_unlock(&locks[name]);
}
