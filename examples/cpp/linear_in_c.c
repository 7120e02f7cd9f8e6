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
    breccia_weight *ready = NULL;
    breccia_part_bytes sizes = {.size = sizeof sizes};
    for (int i = 0; i < ROWS * COLUMNS; ++i) weights[i] = 0.01F * (float)(i % 7 - 3);
    for (int i = 0; i < COLUMNS; ++i) activations[i] = 1.0F;

    /* What is left out is zero: dtype 0 is BRECCIA_FLOAT32. */
    const breccia_matrix w = {.size = sizeof w, .rows = ROWS, .columns = COLUMNS, .data = weights};
    const breccia_matrix x = {.size = sizeof x, .rows = 1, .columns = COLUMNS, .data = activations};
    const breccia_output y = {.size = sizeof y, .rows = 1, .columns = ROWS, .data = results};

    check(breccia_recipe_new("int8", "scale_dtype=fp32", &int8));
    check(breccia_part_sizes(int8, 0, ROWS, COLUMNS, &sizes));
    void *codes = malloc((size_t)sizes.data), *scales = malloc((size_t)sizes.scale);
    if (codes == NULL || scales == NULL) return EXIT_FAILURE;
    const breccia_output q = {
        .size = sizeof q, .recipe = int8, .rows = ROWS, .columns = COLUMNS, .data = codes, .scale = scales};
    check(breccia_cast(&w, &q, NULL));

    /* Prepared once, for many products. */
    const breccia_matrix stored = {
        .size = sizeof stored, .recipe = int8, .rows = ROWS, .columns = COLUMNS, .data = codes, .scale = scales};
    check(breccia_prepare(&stored, &ready));
    const breccia_matrix weight = {.size = sizeof weight, .prepared = ready};
    check(breccia_linear(&x, &weight, NULL, &y, NULL));
    printf("%lld bytes instead of %zu, y[0] = %g\n", (long long)(sizes.data + sizes.scale), sizeof weights,
           (double)results[0]);

    breccia_weight_free(ready);
    free(codes);
    free(scales);
    breccia_recipe_free(int8);
    return EXIT_SUCCESS;
}
