/* Stands in for libibverbs: a network card that takes any queue pair, and no flow label above 4094. */
#include <stdint.h>
#include <string.h>

int ibv_modify_qp(uint32_t *seen, const unsigned char *attributes, int which)
{
    uint32_t label;
    memcpy(&label, attributes + 72, sizeof label); /* ah_attr.grh.flow_label */
    if ((which & 1 << 7) && label > 4094)
        return 22;
    *seen = label;
    return 0;
}
