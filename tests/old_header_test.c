/* A program from before today's library: CMakeLists.txt compiles it against headers whose version
 * is 0.0.1 and whose orchard_attention lacks its last field. Its args structs end right before an
 * unmapped page, so that a library which reads the missing field crashes here. */
#define _DEFAULT_SOURCE
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "fixture.h"

_Static_assert(ORCHARD_HEADER_VERSION == 1, "this test must see the old header");
_Static_assert(offsetof(orchard_attention, seed) + sizeof(uint64_t) == sizeof(orchard_attention),
               "seed must be the old header's last field");

/* `size` bytes that end where memory ends. */
static void *before_unmapped_page(size_t size)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), pages = (size + page - 1) / page;
    char *memory =
        mmap(NULL, (pages + 1) * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || munmap(memory + pages * page, page)) {
        perror("mmap");
        exit(2);
    }
    return memory + pages * page - size;
}

int main(void)
{
    static fixture f;
    orchard_ctx *ctx;
    if (orchard_ctx_create(&ctx, &(orchard_ctx_opts){.threads = 2})) {
        CHECK_FAIL("%s", orchard_last_error());
        return check_report("old_header");
    }
    orchard_attention_forward_args *forward = before_unmapped_page(sizeof *forward);
    orchard_attention_backward_args *backward = before_unmapped_page(sizeof *backward);
    static const fixture_layout layouts[] = {PADDED, ONE_HEAD, PACKED};
    for (int i = 0; i < 3; i++) {
        orchard_explanation explanation;
        fixture_start(&f, layouts[i]);
        f.attention.dropout = 0.25;
        f.attention.seed = 42;
        *forward = f.forward;
        forward->attention = f.attention;
        *backward = f.backward;
        backward->attention = f.attention;
        CHECK_INT(orchard_explain(ctx, "attention_forward", forward, &explanation), ORCHARD_OK);
        CHECK(explanation.backend != NULL);
        CHECK_INT(orchard_attention_forward(ctx, forward), ORCHARD_OK);
        CHECK_INT(orchard_explain(ctx, "attention_backward", backward, &explanation), ORCHARD_OK);
        CHECK_INT(orchard_attention_backward(ctx, backward), ORCHARD_OK);

        /* The missing field counts as 0: so says a struct of full length in a full-length context.
         */
        uint64_t full_forward[sizeof *forward / 8 + 1] = {0},
                                                    full_backward[sizeof *backward / 8 + 1] = {0};
        static fixture_memory old;
        orchard_ctx *newer;
        memcpy(&old, &f.memory, sizeof old);
        memset(f.memory.out, 0xa5, sizeof f.memory.out);
        memset(f.memory.dq, 0xa5, sizeof f.memory.dq);
        memcpy(full_forward, forward, sizeof *forward);
        memcpy(full_backward, backward, sizeof *backward);
        CHECK_INT(orchard_ctx_create_version(&newer, &(orchard_ctx_opts){.threads = 2}, 100),
                  ORCHARD_OK);
        CHECK_INT(orchard_attention_forward(newer, (void *)full_forward), ORCHARD_OK);
        CHECK_INT(orchard_attention_backward(newer, (void *)full_backward), ORCHARD_OK);
        CHECK(memcmp(&old, &f.memory, sizeof old) == 0);

        /* And it is a field that matters: with another offset another mask is drawn. */
        full_forward[sizeof *forward / 8] = 1;
        CHECK_INT(orchard_attention_forward(newer, (void *)full_forward), ORCHARD_OK);
        CHECK(memcmp(&old, &f.memory, sizeof old) != 0);
        orchard_ctx_free(newer);
    }
    orchard_ctx_free(ctx);
    return check_report("old_header");
}
