/* SPDX-License-Identifier: Apache-2.0
 *
 * The smallest C program that needs the library: a recipe, and how much memory it asks for. */
#include <breccia/breccia.h>
#include <stdio.h>

int main(void) {
    breccia_recipe *recipe = NULL;
    breccia_part_bytes sizes = {.size = sizeof sizes};
    if (breccia_recipe_new("mxfp8", NULL, &recipe) != BRECCIA_OK) return 1;
    if (breccia_part_sizes(recipe, 0, 4, 64, &sizes) != BRECCIA_OK) return 1;
    breccia_recipe_free(recipe);
    printf("breccia %s: %d + %d bytes\n", breccia_version(), (int)sizes.data, (int)sizes.scale);
    return sizes.data == 256 && sizes.scale == 8 ? 0 : 1;
}
