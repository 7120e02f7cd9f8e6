/* SPDX-License-Identifier: Apache-2.0
 *
 * A weight quantized to INT8 and multiplied by activations, from C: memory is the program's, errors are statuses. */
#include <breccia/breccia.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 64, COLUMNS = 256 };

static void check(breccia_status status) {
    if (status == BRECCIA_OK) return;
    fprintf(stderr, "%s\n", breccia_last_message());
    exit(EXIT_FAILURE);
}

int main(void) {
    static float weights[ROWS * COLUMNS], activations[COLUMNS], results[ROWS];
    breccia_recipe *int8 = NULL;
    breccia_part_bytes sizes;
    breccia_matrix w = {0}, x = {0}, y = {0}, q = {0};
    for (int i = 0; i < ROWS * COLUMNS; ++i) weights[i] = 0.01F * (float)(i % 7 - 3);
    for (int i = 0; i < COLUMNS; ++i) activations[i] = 1.0F;

    w.rows = ROWS, w.columns = COLUMNS, w.data = weights; /* dtype 0 is BRECCIA_FLOAT32 */
    x.rows = 1, x.columns = COLUMNS, x.data = activations;
    y.rows = 1, y.columns = ROWS, y.data = results;

    check(breccia_recipe_new("int8", "scale_dtype=fp32", &int8));
    check(breccia_part_sizes(int8, ROWS, COLUMNS, &sizes));
    q.recipe = int8, q.rows = ROWS, q.columns = COLUMNS;
    q.data = malloc((size_t)sizes.data);
    q.scale = malloc((size_t)sizes.scale);
    if (q.data == NULL || q.scale == NULL) return EXIT_FAILURE;

    check(breccia_cast(&w, &q));
    check(breccia_linear(&x, &q, NULL, &y));
    printf("%lld bytes instead of %zu, y[0] = %g\n", (long long)(sizes.data + sizes.scale), sizeof weights,
           (double)results[0]);

    free(q.data);
    free(q.scale);
    breccia_recipe_free(int8);
    return EXIT_SUCCESS;
}
